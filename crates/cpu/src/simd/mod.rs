//! Instruction sets. A value of an instruction set's type can only be made on a machine that has the instructions: the
//! type is the proof.
//!
//! All of them share one definition of a dot product, so that one row and many give the same bits: lane i of sixteen
//! sums the products at i, i + 16, i + 32 and so on in that order; then the lanes are added in the fixed tree of
//! [`crate::math::sum_lanes`]. AVX2, AVX-512 and NEON fuse the multiply with the add and agree to the bit. The scalar
//! version rounds twice; it is the reference, within a tolerance.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use std::fmt;
use std::str::FromStr;

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
pub(crate) use {amx::Amx, avx2::Avx2, avx512::Avx512};

/// An instruction set, as operations use it.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Size of the largest tile of dot products that fits into registers: rows of x by rows of w.
    const TILE_ROWS: usize;
    const TILE_COLS: usize;

    const ISA: Isa;

    /// `result[r][c]` is the dot product of `x[r]` and `w[c]`; all slices have the same length.
    fn dot_tile<const R: usize, const C: usize>(self, x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R];

    #[cfg(test)]
    fn dot(self, x: &[f32], w: &[f32]) -> f32 {
        self.dot_tile([x], [w])[0][0]
    }
}

/// An instruction set by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    Scalar,
    /// The vectors of 64-bit ARM, with its integer dot products if the machine has them.
    Neon,
    Avx2,
    Avx512,
    /// AVX-512, and the tile registers of AMX for products of many rows.
    Amx,
}

impl Isa {
    /// All instruction sets. Of those that one machine can have, the faster ones come later.
    pub const ALL: [Isa; 5] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx];

    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

    /// Whether this machine has the instruction set.
    pub fn is_available(self) -> bool {
        Level::of(self).is_some()
    }

    /// Returns the fastest instruction set of this machine.
    pub fn best() -> Isa {
        *Isa::ALL.iter().rev().find(|isa| isa.is_available()).expect("scalar is always available")
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            let known: Vec<&str> = Isa::ALL.iter().map(|isa| isa.name()).collect();
            format!("unknown instruction set \"{name}\"; expected one of {}", known.join(", "))
        })
    }
}

/// The instruction set in use, with the proof that this machine has it; selected once at start.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Level {
    Scalar(Scalar),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Amx(Avx512, Amx),
}

impl Level {
    pub(crate) fn of(isa: Isa) -> Option<Level> {
        match isa {
            Isa::Scalar => Some(Level::Scalar(Scalar)),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Neon::detect().map(Level::Neon),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect().map(Level::Avx2),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::detect().map(Level::Avx512),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Some(Level::Amx(Avx512::detect()?, Amx::detect()?)),
            _ => None,
        }
    }

    pub(crate) fn isa(self) -> Isa {
        match self {
            Level::Scalar(_) => Isa::Scalar,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Isa::Neon,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Isa::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => Isa::Avx512,
            #[cfg(target_arch = "x86_64")]
            Level::Amx(..) => Isa::Amx,
        }
    }
}

/// Evaluates an expression with `$simd` bound to a value of the instruction set's type; the expression is compiled once
/// for each set.
macro_rules! with_simd {
    ($level:expr, $simd:ident => $body:expr) => {
        match $level {
            $crate::simd::Level::Scalar($simd) => $body,
            #[cfg(target_arch = "aarch64")]
            $crate::simd::Level::Neon($simd) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::simd::Level::Avx2($simd) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::simd::Level::Avx512($simd) | $crate::simd::Level::Amx($simd, _) => $body,
        }
    };
}
pub(crate) use with_simd;

/// Declares a function whose loops are compiled once for each instruction set; `S` names the set within its body.
///
/// The body is inlined into a wrapper that has the set's features enabled, which lets the compiler vectorise it.
/// Passing a closure to such a wrapper would not help: a closure keeps the features of the function that it was written
/// in.
macro_rules! vectorized {
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident<S: Simd>($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block
    ) => {
        $(#[$attribute])*
        $visibility fn $name<S: $crate::simd::Simd>(_: S, $($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body<S: $crate::simd::Simd>($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                body::<$crate::simd::Avx2>($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                body::<$crate::simd::Avx512>($($argument),*)
            }

            match S::ISA {
                $crate::simd::Isa::Scalar => body::<$crate::simd::Scalar>($($argument),*),
                // NEON is enabled in every function for this target.
                #[cfg(target_arch = "aarch64")]
                $crate::simd::Isa::Neon => body::<$crate::simd::Neon>($($argument),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the first argument, a value of S, proves that the instructions are there.
                $crate::simd::Isa::Avx2 => unsafe { avx2($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the first argument, a value of S, proves that the instructions are there.
                $crate::simd::Isa::Avx512 => unsafe { avx512($($argument),*) },
                _ => unreachable!("no value of another instruction set exists on this machine"),
            }
        }
    };
}
pub(crate) use vectorized;

/// Prefetches the cache line at `address`, which may be any address, into the first-level cache.
#[inline(always)]
pub(crate) fn prefetch_to_l1(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch has no effect that the program could observe and faults at no address; every x86-64 processor
    // has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// Prefetches the cache line at `address`, which may be any address, into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_to_l2(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: see `prefetch_to_l1`.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// The last, incomplete sixteen values of a row, filled up with zeros: a fused multiply-add of zeros does not change a
/// lane.
#[inline(always)]
fn padded(tail: &[f32]) -> [f32; 16] {
    let mut lanes = [0.0; 16];
    lanes[..tail.len()].copy_from_slice(tail);
    lanes
}

#[cfg(test)]
#[allow(clippy::print_stderr, reason = "a test says that it was skipped")]
mod tests {
    use super::*;

    /// Values that exercise rounding: magnitudes over six decades, both signs.
    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let unit = (state >> 8) as f32 / (1 << 24) as f32 - 0.5;
                unit * 10f32.powi((state % 7) as i32 - 3)
            })
            .collect()
    }

    fn tile_equals_single_dots(simd: impl Simd) {
        for len in [0, 1, 15, 16, 17, 31, 64, 100, if cfg!(miri) { 101 } else { 577 }] {
            let x: Vec<Vec<f32>> = (0..3).map(|r| values(len, r)).collect();
            let w: Vec<Vec<f32>> = (0..4).map(|c| values(len, 100 + c)).collect();
            let tile = simd.dot_tile([&x[0], &x[1], &x[2]], [&w[0], &w[1], &w[2], &w[3]]);
            for r in 0..3 {
                for c in 0..4 {
                    assert_eq!(
                        tile[r][c].to_bits(),
                        simd.dot(&x[r], &w[c]).to_bits(),
                        "length {len}, row {r}, column {c}"
                    );
                    let exact: f64 = x[r].iter().zip(&w[c]).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    let size: f64 = x[r].iter().zip(&w[c]).map(|(&a, &b)| (f64::from(a) * f64::from(b)).abs()).sum();
                    // Each lane adds len / 16 products and the tree four sums, each rounding to 2^-24 of the running
                    // size.
                    let bound = size * (len as f64 / 16.0 + 6.0) * 2f64.powi(-24);
                    assert!((f64::from(tile[r][c]) - exact).abs() <= bound, "length {len}: {} and {exact}", tile[r][c]);
                }
            }
        }
    }

    #[test]
    fn a_tile_has_the_bits_of_its_single_dot_products() {
        for isa in Isa::ALL {
            match Level::of(isa) {
                Some(level) => with_simd!(level, simd => tile_equals_single_dots(simd)),
                None => eprintln!("skipped: this machine does not have {isa}"),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx2_and_avx512_agree_to_the_bit() {
        let (Some(avx2), Some(avx512)) = (Avx2::detect(), Avx512::detect()) else {
            eprintln!("skipped: this machine does not have both");
            return;
        };
        for len in [3, 16, 64, 333, 2048] {
            let (x, w) = (values(len, 1), values(len, 2));
            assert_eq!(avx2.dot(&x, &w).to_bits(), avx512.dot(&x, &w).to_bits(), "length {len}");
        }
    }

    #[test]
    fn names_read_back() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse::<Isa>().unwrap(), isa);
        }
        assert!("mmx".parse::<Isa>().unwrap_err().contains("avx512"));
    }
}
