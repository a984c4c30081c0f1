//! [`LinearProduct`]: the parameter of every kernel of linear maps, and the choice of a kernel by the number of rows.
//!
//! | rows | GPUs of compute capability 9.0 | other GPUs |
//! |---|---|---|
//! | up to 8, quantized | `few_rows_ring` | `few_rows` |
//! | up to 8, F16 and BF16 | `few_rows` | `few_rows` |
//! | more | `many_rows_wgmma` | `many_rows` |
//! | any, F32 | `many_rows` (`linear_f32`) | `many_rows` |

use pellucid_tensor::{DType, Error};

use super::few_rows_ring::{self, StreamPlan};
use super::{few_rows, many_rows, many_rows_wgmma};
use crate::driver::{Device, Grid};
use crate::kernels::rows::norm::{self, Norm};
use crate::kernels::{GROUP_COLS, Operand};

/// Matrices of one format with the same input that one launch multiplies.
pub(crate) const MAX_PARTS: usize = 3;

/// Number of tiles whose weights are adjacent in memory, and the number of their outputs.
const SIDE: u32 = 8;
const TILE_ROWS: u32 = 16 * SIDE;

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct LinearPart {
    pub(crate) weight: u64,
    pub(crate) bias: u64,
    pub(crate) out: u64,
    pub(crate) outputs: u32,
    pub(crate) first_tile: u32,
}

/// `Linear` of linear_map.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct LinearProduct {
    pub(crate) x: Operand,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) slices: u32,
    num_parts: u32,
    pub(crate) num_tiles: u32,
    parts: [LinearPart; MAX_PARTS],
    pub(crate) workspace: u64,
    x_plain: u64,
    norm_weight: u64,
    normed: u64,
    residual: u64,
    maxima: u64,
    eps: f32,
    maxima_are: u32,
    makes_operand: u32,
    is_gated: u32,
    activation: u32,
    pub(crate) plan: StreamPlan,
    result: Operand,
}

/// `SliceSums` of linear_map.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct SliceSums {
    sums: u64,
    scales: u64,
    bias: u64,
    stride: u64,
    pitch: u32,
    count: u32,
}

impl SliceSums {
    pub(crate) const NONE: SliceSums = SliceSums { sums: 0, scales: 0, bias: 0, stride: 0, pitch: 0, count: 0 };

    pub(crate) fn is_none(&self) -> bool {
        self.sums == 0
    }
}

/// Number of slices of a product with split K. It depends on the number of columns alone, because it fixes the order of
/// the sums.
fn slices(cols: usize) -> u32 {
    match cols.div_ceil(256) {
        0..2 => 1,
        2..4 => 2,
        4..8 => 4,
        _ => 8,
    }
}

/// Whether the kernels of few rows can make the operand of rows of `cols` columns.
pub(crate) fn makes_operand(cols: usize) -> bool {
    cols.is_multiple_of(4)
}

/// Whether the kernels of few rows can make the operand of a norm: they imitate the 1024 threads of `rms_norm`.
pub(crate) fn takes_norm(cols: u32) -> bool {
    norm::threads(cols) == 1024 && cols.is_multiple_of(4)
}

/// The use that a kernel of few rows makes of the largest magnitudes of gated rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Maxima {
    Known = 1,
    Found = 2,
    Cleared = 3,
}

impl LinearProduct {
    /// `parts` are (weight, bias or 0, out, outputs).
    pub(crate) fn new(x: Operand, num_rows: usize, cols: usize, parts: &[(u64, u64, u64, usize)]) -> Self {
        assert!(!parts.is_empty() && parts.len() <= MAX_PARTS);
        let mut product = LinearProduct {
            x,
            num_rows: num_rows as u32,
            cols: cols as u32,
            slices: slices(cols),
            num_parts: parts.len() as u32,
            num_tiles: 0,
            parts: [LinearPart::default(); MAX_PARTS],
            workspace: 0,
            x_plain: 0,
            norm_weight: 0,
            normed: 0,
            residual: 0,
            maxima: 0,
            eps: 0.0,
            maxima_are: 0,
            makes_operand: 0,
            is_gated: 0,
            activation: 0,
            plan: StreamPlan::default(),
            result: Operand::NONE,
        };
        for (part, &(weight, bias, out, outputs)) in product.parts.iter_mut().zip(parts) {
            *part = LinearPart { weight, bias, out, outputs: outputs as u32, first_tile: product.num_tiles };
            product.num_tiles += (outputs as u32).div_ceil(TILE_ROWS) * SIDE;
        }
        product
    }

    /// Launches a product with weights of f32 and rows x of f32.
    pub(crate) fn launch_f32(mut self, device: &Device, x: u64) -> Result<(), Error> {
        const WARPS: u32 = 8;
        self.x_plain = x;
        // Three stages of the rows and outputs of a block of `linear_f32_many`, 128 columns each.
        const STAGES_BYTES: u32 = 3 * (16 + 64) * 128 * 4;
        let serves_many = self.cols.is_multiple_of(4) && STAGES_BYTES <= device.shared_limit;
        // The rows and outputs of a block: more share loads, fewer fill the device.
        let (kernel, rows, outputs, shared_bytes) = match self.num_rows {
            0..=16 => ("linear_f32", 1, WARPS, 0),
            129.. if serves_many => ("linear_f32_many", 16, 64, STAGES_BYTES),
            _ => ("linear_f32_some", 4, WARPS, 0),
        };
        let blocks = [self.parts[0].outputs.div_ceil(outputs), self.num_rows.div_ceil(rows), 1];
        device.launch(kernel, Grid { blocks, threads: 32 * WARPS, shared_bytes }, &self)
    }

    /// Launches a product of weights of f32 with the norm of one or two rows, which the kernel writes too.
    pub(crate) fn launch_f32_normed(mut self, device: &Device, norm: &Norm) -> Result<(), Error> {
        const WARPS: u32 = 8;
        let shared_bytes = self.cols * 4;
        if shared_bytes + 1024 > device.shared_limit {
            norm::norm(device, "rms_norm", self.num_rows as usize, norm)?;
            return self.launch_f32(device, norm.out);
        }
        self.make_operand_of_norm(norm);
        let blocks = [self.parts[0].outputs.div_ceil(WARPS), self.num_rows, 1];
        device.launch("linear_f32_normed", Grid { blocks, threads: 32 * WARPS, shared_bytes }, &self)
    }

    /// Returns the number of outputs of all parts, except that the last tile of a part counts as full.
    pub(crate) fn num_outputs(&self) -> usize {
        16 * self.num_tiles as usize
    }

    /// Whether the rows fit into the shared memory of a kernel of few rows.
    pub(crate) fn few_fits(&self, device: &Device, dtype: DType) -> bool {
        few_rows_ring::serves(device, dtype, self) || few_rows::fits(device, self)
    }

    /// Launches a product of up to eight rows that fit.
    pub(crate) fn launch_few(&self, device: &Device, dtype: DType) -> Result<(), Error> {
        match few_rows_ring::serves(device, dtype, self) {
            true => few_rows_ring::launch(device, dtype, self),
            false => few_rows::launch(device, dtype, self),
        }
    }

    /// Lets the kernel make the operand from rows of f32.
    pub(crate) fn make_operand_of(&mut self, x: u64) {
        self.x_plain = x;
        self.makes_operand = 1;
    }

    /// Lets the kernel make the operand from the norm of rows of f32, which it writes too.
    pub(crate) fn make_operand_of_norm(&mut self, norm: &Norm) {
        assert!(takes_norm(self.cols));
        self.make_operand_of(norm.x);
        self.norm_weight = norm.weight;
        self.normed = norm.out;
        self.eps = norm.eps;
    }

    /// Sets the address of the largest magnitudes of gated rows, and what this product does with them.
    pub(crate) fn maxima(&mut self, address: u64, are: Maxima) {
        self.maxima = address;
        self.maxima_are = are as u32;
    }

    /// This product and one of the same input in another format, whose tiles follow; `None` if they have more than
    /// [`MAX_PARTS`] parts.
    pub(crate) fn with(&self, other: &LinearProduct) -> Option<LinearProduct> {
        let (mine, others) = (self.num_parts as usize, other.num_parts as usize);
        (mine + others <= MAX_PARTS).then(|| {
            let mut both = *self;
            for (part, other) in both.parts[mine..].iter_mut().zip(&other.parts[..others]) {
                *part = LinearPart { first_tile: self.num_tiles + other.first_tile, ..*other };
            }
            both.num_parts += other.num_parts;
            both.num_tiles += other.num_tiles;
            both
        })
    }

    pub(crate) fn is_gated(&self) -> bool {
        self.is_gated != 0
    }

    /// Also adds the result, which must be the only one, to the rows at `residual`.
    pub(crate) fn add_to(&mut self, residual: u64) {
        assert!(self.num_parts == 1 && self.is_gated == 0);
        self.residual = residual;
    }

    /// Makes the first of two results activation(first) * second.
    pub(crate) fn gate_by(&mut self, activation: u32) {
        assert!(self.is_pair());
        self.is_gated = 1;
        self.activation = activation;
    }

    /// Whether there are two matrices of one shape.
    pub(crate) fn is_pair(&self) -> bool {
        let [first, second, _] = self.parts;
        self.num_parts == 2 && first.outputs == second.outputs
    }

    /// Whether the outputs of every matrix fill whole groups.
    pub(crate) fn fills_groups(&self) -> bool {
        self.parts[..self.num_parts as usize].iter().all(|part| part.outputs.is_multiple_of(GROUP_COLS as u32))
    }

    /// Rounds the gated result to this operand too.
    pub(crate) fn round_to(&mut self, result: Operand) {
        self.result = result;
    }

    /// Bytes of the sums of all slices.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.slices as usize * self.num_rows as usize * self.num_tiles as usize * 16 * 4
    }

    /// Launches a product with weights in tiles. `workspace(bytes)` allocates memory for the sums of slices. If there
    /// are any, returns the product: its slices are to be added up by [`LinearProduct::combine`], or by the kernel that
    /// reads it.
    pub(crate) fn launch(
        self,
        device: &Device,
        dtype: DType,
        workspace: impl FnOnce(usize) -> Result<u64, Error>,
    ) -> Result<Option<LinearProduct>, Error> {
        if self.num_rows <= 8 && self.few_fits(device, dtype) {
            self.launch_few(device, dtype)?;
            return Ok(None);
        }
        match many_rows_wgmma::serves(device, dtype) {
            true => many_rows_wgmma::launch(device, dtype, self, workspace),
            false => many_rows::launch(device, dtype, self, workspace),
        }
    }

    /// Launches the addition of the sums of slices.
    pub(crate) fn combine(&self, device: &Device) -> Result<(), Error> {
        let vectors = self.num_rows as usize * self.num_tiles as usize * 4;
        device.launch("linear_combine", Grid::items(vectors, 256), self)
    }

    /// Returns the sums of slices that are still to be added, if there is one matrix.
    pub(crate) fn slice_sums(&self) -> Option<SliceSums> {
        let pitch = self.num_tiles * 16;
        let fits = self.workspace != 0 && self.num_parts == 1;
        fits.then(|| SliceSums {
            sums: self.workspace,
            scales: self.x.scales,
            bias: self.parts[0].bias,
            stride: u64::from(self.num_rows * pitch),
            pitch,
            count: self.slices,
        })
    }
}
