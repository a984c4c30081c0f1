//! Launches of `linear.cu`: which kernel for how many rows.

use pellucid_tensor::{DType, Error};

use super::norm::{self, Norm};
use super::stream::{self, StreamPlan};
use super::{GROUP_COLS, Operand, wide};
use crate::driver::{Device, Grid};

macro_rules! linear_kernels {
    ($($format:literal),*) => {
        &[
            "linear_f32",
            "linear_combine",
            $(
                concat!("linear_few_", $format),
                concat!("linear_many16_", $format),
                concat!("linear_many32_", $format),
                concat!("linear_many64_", $format),
                concat!("linear_many128_", $format),
            )*
        ]
    };
}

pub(crate) const KERNELS: &[&str] = linear_kernels!("f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k");

/// Matrices of one format with the same input that one launch multiplies.
pub(crate) const MAX_PARTS: usize = 3;

/// Tiles whose weights lie side by side, and the outputs that they have together.
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

/// `Linear` of linear.cu.
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

/// `SliceSums` of product.cu.
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
}

/// The kernel family of a format, by the index of its first name in [`KERNELS`].
fn family(dtype: DType) -> Option<usize> {
    let place = match dtype {
        DType::F16 => 0,
        DType::BF16 => 1,
        DType::Q8_0 => 2,
        DType::Q4_0 => 3,
        DType::Q4_K => 4,
        DType::Q5_K => 5,
        DType::Q6_K => 6,
        _ => return None,
    };
    Some(2 + 5 * place)
}

/// Into how many slices the columns are cut: by their number alone, since it fixes the order of the sums.
fn slices(cols: usize) -> u32 {
    match cols.div_ceil(256) {
        0..2 => 1,
        2..4 => 2,
        4..8 => 4,
        _ => 8,
    }
}

/// Whether `linear_few` can make the operand of rows of so many columns by itself.
pub(crate) fn makes_operand(cols: usize) -> bool {
    cols.is_multiple_of(4)
}

/// Whether it can make the norm's as well: the threads of `rms_norm` must be as many as it plays.
pub(crate) fn takes_norm(cols: u32) -> bool {
    norm::threads(cols) == 1024 && cols.is_multiple_of(4)
}

/// What `linear_few` does with the largest magnitudes of gated rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Maxima {
    Known = 1,
    Found = 2,
    Cleared = 3,
}

const FEW_WARPS: u32 = 16;

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

    /// With weights of f32: x as it is.
    pub(crate) fn launch_plain(mut self, device: &Device, x: u64) -> Result<(), Error> {
        const WARPS: u32 = 8;
        self.x_plain = x;
        let blocks = [self.parts[0].outputs.div_ceil(WARPS), self.num_rows.div_ceil(8), 1];
        device.launch("linear_f32", Grid { blocks, threads: 32 * WARPS, shared_bytes: 0 }, &self)
    }

    /// Bytes of the rows of x in the shared memory of `linear_few`.
    fn few_shared(&self) -> u32 {
        self.num_rows * (self.x.pitch * 2 + 16)
    }

    /// Whether a kernel for few rows has room for these; the shared memory of `linear_few` is less than 17 KiB besides.
    pub(crate) fn few_fits(&self, device: &Device, dtype: DType) -> bool {
        stream::serves(device, dtype, self) || self.few_shared() + (17 << 10) <= device.shared_limit
    }

    /// Up to eight rows that fit.
    pub(crate) fn launch_few(&self, device: &Device, dtype: DType) -> Result<(), Error> {
        if stream::serves(device, dtype, self) {
            return stream::launch(device, dtype, self);
        }
        let kernel = KERNELS[family(dtype).expect("a format with tiles")];
        let blocks = (self.num_tiles * self.slices).div_ceil(FEW_WARPS).min(device.num_multiprocessors());
        let shared_bytes = self.few_shared();
        let grid = Grid { blocks: [blocks, 1, 1], threads: 32 * FEW_WARPS, shared_bytes };
        device.launch(kernel, grid, self)
    }

    /// `linear_few` makes the operand itself, from rows of f32.
    pub(crate) fn take_plain(&mut self, x: u64) {
        self.x_plain = x;
        self.makes_operand = 1;
    }

    /// ... of their norm, which it also writes.
    pub(crate) fn take_norm(&mut self, norm: &Norm) {
        assert!(takes_norm(self.cols));
        self.norm_weight = norm.weight;
        self.normed = norm.out;
        self.eps = norm.eps;
    }

    /// Where the largest magnitudes of gated rows are found, and what this product does about them.
    pub(crate) fn maxima(&mut self, address: u64, are: Maxima) {
        self.maxima = address;
        self.maxima_are = are as u32;
    }

    /// This product and one of the same input in another format, whose tiles follow; `None` if they have more than [`MAX_PARTS`] parts.
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

    /// Adds the one result to the rows at `residual` too.
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

    /// The gated result is also rounded to this.
    pub(crate) fn round_to(&mut self, result: Operand) {
        self.result = result;
    }

    /// Bytes of the sums of all slices.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.slices as usize * self.num_rows as usize * self.num_tiles as usize * 16 * 4
    }

    /// With weights in tiles. `workspace(bytes)` gives room for the sums of slices. Where there are such, the product comes back, to be
    /// added up: by [`LinearProduct::combine`], or by whoever reads it.
    pub(crate) fn launch(
        mut self,
        device: &Device,
        dtype: DType,
        workspace: impl FnOnce(usize) -> Result<u64, Error>,
    ) -> Result<Option<LinearProduct>, Error> {
        if self.num_rows <= 8 && self.few_fits(device, dtype) {
            self.launch_few(device, dtype)?;
            return Ok(None);
        }
        let first = family(dtype).expect("a format with tiles");
        if wide::serves(device, dtype) {
            return wide::launch(device, dtype, self, workspace);
        }
        let (kernel, rows, threads) = match self.num_rows {
            0..=16 => (KERNELS[first + 1], 16, 128),
            17..=32 => (KERNELS[first + 2], 32, 128),
            33..=64 => (KERNELS[first + 3], 64, 128),
            _ => (KERNELS[first + 4], 128, 256),
        };
        let mut blocks = [self.num_rows.div_ceil(rows), self.num_tiles.div_ceil(8), 1];
        // Few blocks would leave most multiprocessors idle: then the slices have blocks of their own.
        if blocks[0] * blocks[1] < 3 * device.num_multiprocessors() / 4 && self.slices > 1 {
            self.workspace = workspace(self.workspace_bytes())?;
            blocks[2] = self.slices;
        }
        // Four stages of rows of 64 columns, 144 bytes each.
        device.launch(kernel, Grid { blocks, threads, shared_bytes: 4 * rows * 144 }, &self)?;
        Ok((self.workspace != 0).then_some(self))
    }

    /// Adds up the slices that are left.
    pub(crate) fn combine(&self, device: &Device) -> Result<(), Error> {
        let vectors = self.num_rows as usize * self.num_tiles as usize * 4;
        device.launch("linear_combine", Grid::items(vectors, 256), self)
    }

    /// The sums of slices that are left, if there is one matrix.
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
