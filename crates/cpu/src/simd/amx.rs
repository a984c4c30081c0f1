//! AMX: detecting, enabling and configuring tile registers. `matmul` and `attention` hold the products that use them.
//!
//! The compiler does not know tiles: the instructions are written in `asm!`, and no compiled code uses the registers in
//! between.
//!
//! **Kernels use few tiles.** A core seems to rename tiles with a small set of physical registers, of which a program
//! has fewer while another program (such as another virtual machine) runs on the core's second hardware thread. With
//! all eight tiles in use, every load and every multiplication then waits until the one before it has retired. A tile
//! of zeros seems to take no register. This is inferred from measurements: on 2026-11-15 on a Xeon (model 207), a load
//! and a multiplication with 3, 4, 5, 6, 7 and 8 tiles in use took 10, 11, 13, 16, 22 and 31 ns while the second
//! hardware thread was busy, and 7 ns with any number of tiles otherwise. So kernels use at most six tiles, and zero
//! each tile after its last use.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Proof that the machine has AMX for 8-bit integers and bf16, and that the operating system allows this program to use
/// it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    pub(crate) fn detect() -> Option<Self> {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        let available = *AVAILABLE.get_or_init(|| {
            super::Avx512::detect().is_some()
                && is_x86_feature_detected!("avx512vnni")
                && is_supported_here()
                && is_permitted()
        });
        available.then_some(Amx(()))
    }
}

/// Whether processor and operating system support tiles, by CPUID leaf 1 ECX, leaf 7 EDX, and XCR0.
fn is_supported(leaf1_ecx: u32, leaf7_edx: u32, xcr0: u64) -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const TILE_STATE: u64 = 1 << 17 | 1 << 18;
    leaf1_ecx & OSXSAVE != 0 && leaf7_edx & BF16_TILE_INT8 == BF16_TILE_INT8 && xcr0 & TILE_STATE == TILE_STATE
}

fn is_supported_here() -> bool {
    let (highest, leaf1) = (__cpuid(0).eax, __cpuid(1));
    if highest < 7 {
        return false;
    }
    // XGETBV may be executed only if the operating system has enabled it; without it, there are no tiles either.
    if !is_x86_feature_detected!("xsave") || leaf1.ecx & 1 << 27 == 0 {
        return false;
    }
    // SAFETY: the check above says that XGETBV may be executed.
    let xcr0 = unsafe { _xgetbv(0) };
    is_supported(leaf1.ecx, __cpuid_count(7, 0).edx, xcr0)
}

/// Requests the permission to use tile data, which Linux grants to all threads of a program at once.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two integers and changes only the permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The shapes of the eight tiles, as `ldtilecfg` reads them.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Default for TileConfig {
    fn default() -> Self {
        TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] }
    }
}

impl TileConfig {
    pub(crate) fn set(&mut self, tile: usize, rows: usize, row_bytes: usize) {
        assert!(
            tile < 8 && (1..=16).contains(&rows) && (4..=64).contains(&row_bytes),
            "a tile of at most 16 x 64 bytes"
        );
        self.rows[tile] = rows as u8;
        self.row_bytes[tile] = row_bytes as u16;
    }

    /// Configures the tile registers of the calling thread, and zeroes them.
    ///
    /// # Safety
    /// A value of [`Amx`] exists.
    pub(crate) unsafe fn load(&self) {
        // SAFETY: the configuration is 64 bytes in the format of the instruction, by `set`; the caller guarantees AMX.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, preserves_flags, readonly)) };
    }
}

/// Releases the tile registers, so that the operating system need not save them when it switches threads.
///
/// # Safety
/// A value of [`Amx`] exists.
pub(crate) unsafe fn release_tiles() {
    // SAFETY: the caller guarantees AMX.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_and_system_must_both_support_tiles() {
        let (ecx, edx, xcr0) = (1 << 27, 1 << 22 | 1 << 24 | 1 << 25, 0x602e7);
        assert!(is_supported(ecx, edx, xcr0));
        assert!(!is_supported(0, edx, xcr0), "no XSAVE: the system does not save tiles");
        for bit in [22, 24, 25] {
            assert!(!is_supported(ecx, edx & !(1 << bit), xcr0), "leaf 7 EDX bit {bit}");
        }
        for bit in [17, 18] {
            assert!(!is_supported(ecx, edx, xcr0 & !(1 << bit)), "XCR0 bit {bit}");
        }
        assert!(!is_supported(0, 0, 0), "an older machine");
    }

    #[test]
    fn a_configuration_is_64_bytes_in_the_order_of_the_manual() {
        let mut config = TileConfig::default();
        config.set(3, 9, 32);
        assert_eq!(size_of::<TileConfig>(), 64);
        assert_eq!((std::mem::offset_of!(TileConfig, row_bytes), std::mem::offset_of!(TileConfig, rows)), (16, 48));
        assert_eq!((config.palette, config.rows[3], config.row_bytes[3]), (1, 9, 32));
    }
}
