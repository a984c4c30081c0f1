//! Launches of `elementwise.cu`: operations on each row, or on each value of it.

use pellucid_tensor::{Activation, Error, RopeStyle, TokenSlots, TokenSource};

use crate::driver::{Device, Grid};
use crate::kernels::{GROUP_COLS, Operand};

pub(crate) const KERNELS: &[&str] = &[
    "embed",
    "gather_rows",
    "scatter_rows",
    "add",
    "clear",
    "soft_cap",
    "scale",
    "activate",
    "gate",
    "gate_columns",
    "sigmoid_gate",
    "heads_of_rows",
    "join_heads",
    "gate_with_operand",
    "make_operand",
    "make_scaled_operand",
    "rope_angles",
    "rope",
    "read_bytes",
    "round_rows",
];

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Embed {
    pub(crate) table: u64,
    pub(crate) ids: u64,
    pub(crate) assumed: u64,
    pub(crate) out: u64,
    pub(crate) row_bytes: u64,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) table_rows: u32,
    pub(crate) format: u32,
    pub(crate) scale: f32,
}

impl Embed {
    /// Launches several blocks for a row if there are few rows.
    pub(crate) fn launch(&self, device: &Device) -> Result<(), Error> {
        const THREADS: u32 = 256;
        let pieces = self.cols.div_ceil(THREADS).min((device.num_multiprocessors() / self.num_rows.max(1)).max(1));
        device.launch("embed", Grid { blocks: [self.num_rows, pieces, 1], threads: THREADS, shared_bytes: 0 }, self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct MovedRows {
    pub(crate) x: u64,
    pub(crate) rows: u64,
    pub(crate) out: u64,
    pub(crate) cols: u32,
}

impl MovedRows {
    pub(crate) fn launch(&self, device: &Device, kernel: &'static str, num_rows: usize) -> Result<(), Error> {
        device.launch(kernel, Grid::linear(num_rows as u32, row_threads(self.cols as usize)), self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Elementwise {
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) len: u64,
    pub(crate) cap: f32,
    pub(crate) activation: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct GateByColumns {
    pub(crate) x: u64,
    pub(crate) by: u64,
    pub(crate) len: u64,
    pub(crate) cols: u32,
    pub(crate) pitch: u32,
    pub(crate) activation: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct HeadRows {
    pub(crate) heads: u64,
    pub(crate) num_pairs: u32,
    pub(crate) num_heads: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct JoinHeads {
    pub(crate) parts: [u64; 2],
    pub(crate) out: u64,
    pub(crate) len: u64,
    pub(crate) cols: [u32; 2],
}

impl JoinHeads {
    pub(crate) fn launch(&self, device: &Device) -> Result<(), Error> {
        device.launch("join_heads", grid_of_values(device, self.len), self)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct GateRows {
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) cols: u32,
    pub(crate) activation: u32,
    pub(crate) operand: Operand,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct OperandRows {
    pub(crate) x: u64,
    pub(crate) cols: u32,
    pub(crate) operand: Operand,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Angles {
    pub(crate) positions: u64,
    pub(crate) frequencies: u64,
    pub(crate) out: u64,
    pub(crate) num_rows: u32,
    pub(crate) pairs: u32,
    pub(crate) factor: f32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Rotation {
    pub(crate) x: u64,
    pub(crate) angles: u64,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) head_size: u32,
    pub(crate) pairs: u32,
    pub(crate) interleaved: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ReadBytes {
    pub(crate) from: u64,
    /// In units of 16 bytes.
    pub(crate) len: u64,
    pub(crate) sink: u64,
}

/// `SQUARED_RELU` of elementwise.cu: only its kernels have it.
const SQUARED_RELU: u32 = 4;

pub(crate) fn activation_code(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
        Activation::ClampedSwiglu => 3,
        Activation::SquaredRelu => SQUARED_RELU,
    }
}

/// `ASSUMED` of elementwise.cu: an id with this bit is an index of the tokens that digests assumed.
const ASSUMED: u32 = 1 << 31;

/// Slots in which assumed tokens are kept, and the tokens of each. Those of the digests that were made last follow.
pub(crate) const TOKEN_SLOTS: TokenSlots = TokenSlots { num_slots: 16, num_rows: 128 };
pub(crate) const NUM_KEPT: usize = TOKEN_SLOTS.num_slots * TOKEN_SLOTS.num_rows;

/// The code of a row's token on the device.
pub(crate) fn token_code(id: TokenSource) -> u32 {
    match id {
        TokenSource::Token(token) => token,
        TokenSource::Assumed { row } => ASSUMED | (NUM_KEPT as u32 + row),
        TokenSource::Kept { slot, row } => ASSUMED | (slot * TOKEN_SLOTS.num_rows as u32 + row),
    }
}

pub(crate) fn style_code(style: RopeStyle) -> u32 {
    u32::from(style == RopeStyle::Interleaved)
}

/// Threads of a block that takes a row of `cols` values.
pub(crate) fn row_threads(cols: usize) -> u32 {
    (cols.next_multiple_of(32) as u32).clamp(32, 1024)
}

/// Launches a kernel that takes each value separately.
pub(crate) fn launch(device: &Device, kernel: &'static str, parameter: Elementwise) -> Result<(), Error> {
    device.launch(kernel, grid_of_values(device, parameter.len), &parameter)
}

/// Enough blocks to fill every multiprocessor; each loops over the rest of `len` values.
fn grid_of_values(device: &Device, len: u64) -> Grid {
    let most = device.num_multiprocessors() * 16;
    Grid::linear(len.div_ceil(256).min(u64::from(most)) as u32, 256)
}

impl GateByColumns {
    /// Launches `gate_columns` or `sigmoid_gate`.
    pub(crate) fn launch(&self, device: &Device, kernel: &'static str) -> Result<(), Error> {
        device.launch(kernel, grid_of_values(device, self.len), self)
    }
}

/// Values of a row that a block takes if a row is distributed over blocks, and the maximum number of such pieces.
const PIECE: usize = 1024;
pub(crate) const MAX_PIECES: usize = 64;

/// Launches `x = activation(x) * y`, and the operand of x.
pub(crate) fn gate(device: &Device, rows: usize, parameter: &GateRows) -> Result<(), Error> {
    let GateRows { x, cols, operand, .. } = *parameter;
    // An operand is padded with zeros after the last column.
    let pieces = operand.pitch.div_ceil(PIECE as u32);
    let grid = Grid { blocks: [pieces, rows as u32, 1], threads: 256, shared_bytes: 0 };
    device.launch("gate_with_operand", grid, parameter)?;
    if operand.is_bf16 != 0 {
        return Ok(());
    }
    device.launch("make_scaled_operand", grid, &OperandRows { x, cols, operand })
}

/// `to[i] = x[i]` rounded to BF16.
pub(crate) fn round(device: &Device, x: u64, len: usize, to: u64) -> Result<(), Error> {
    let parameter = Elementwise { x: to, y: x, len: len as u64, cap: 0.0, activation: 0 };
    let blocks = (len as u64).div_ceil(4 * 256).min(u64::from(device.num_multiprocessors() * 16)) as u32;
    device.launch("round_rows", Grid::linear(blocks, 256), &parameter)
}

/// Whether a row is short enough to be distributed over blocks.
pub(crate) fn has_pieces(cols: usize) -> bool {
    cols.next_multiple_of(GROUP_COLS).div_ceil(PIECE) <= MAX_PIECES
}

/// Launches the making of the operand of `rows` rows.
pub(crate) fn make_operand(device: &Device, x: u64, rows: usize, cols: usize, operand: Operand) -> Result<(), Error> {
    let parameter = OperandRows { x, cols: cols as u32, operand };
    device.launch("make_operand", Grid::linear(rows as u32, row_threads(cols / 4)), &parameter)
}
