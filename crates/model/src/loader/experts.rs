//! Finds the matrices of experts: a tensor for each, or a tensor that stacks those of all experts.

use pellucid_tensor::{DType, SharedBytes};

use super::tensor_finder::{ModulePath, TensorFinder};
use crate::Error;
use crate::architectures::Blueprint;

/// How a file stores the matrices of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertLayout {
    /// A tensor for each expert's matrix, or `[experts][out][in]` for all: gate, up and down separately.
    Separate,
    /// `[experts][2 * out][in]`, the rows of gate before those of up, and `[experts][out][in]` for down.
    Stacked,
    /// `[experts][in][2 * out]`, the columns of gate before those of up, and `[experts][in][out]` for down. A file may
    /// have the shapes of `Stacked` instead, as the reference implementation writes them. The names have no ending.
    Transposed,
}

/// One of the three matrices of a gated expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertMatrix {
    Gate,
    Up,
    Down,
}

/// A tensor that stacks matrices of all experts, and which part of it is wanted.
#[derive(Debug, Clone)]
pub(crate) struct ExpertStack {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Number of matrices of an expert, and the index of the wanted one.
    num_parts: usize,
    part: usize,
    is_transposed: bool,
}

impl ExpertStack {
    /// Finds the tensor with a matrix of all experts, `rows` x `cols` each, and checks its shape. Returns `None` if
    /// each expert has a tensor of its own.
    pub(crate) fn find(
        finder: &mut TensorFinder<'_>,
        blueprint: &Blueprint,
        matrix: ExpertMatrix,
        layer: usize,
    ) -> Result<Option<ExpertStack>, Error> {
        let Blueprint { config, names, expert_layout, .. } = blueprint;
        let experts = config.experts.expect("checked with the configuration");
        let (rows, cols) = match matrix {
            ExpertMatrix::Gate | ExpertMatrix::Up => (experts.mlp_size, config.hidden_size),
            ExpertMatrix::Down => (config.hidden_size, experts.mlp_size),
        };
        let fused = ModulePath::new(names.fused_expert_gate_up, layer);
        let is_fused = *expert_layout != ExpertLayout::Separate || finder.exists(fused);
        let (template, num_parts, part) = match matrix {
            ExpertMatrix::Gate if is_fused => (names.fused_expert_gate_up, 2, 0),
            ExpertMatrix::Up if is_fused => (names.fused_expert_gate_up, 2, 1),
            ExpertMatrix::Gate => (names.expert_gate, 1, 0),
            ExpertMatrix::Up => (names.expert_up, 1, 0),
            ExpertMatrix::Down => (names.expert_down, 1, 0),
        };
        if template.contains("{expert}") {
            return Ok(None);
        }
        let may_be_transposed = *expert_layout == ExpertLayout::Transposed;
        let name = finder.name(ModulePath::new(template, layer), if may_be_transposed { "" } else { "weight" });
        let stacked = [experts.num_experts, num_parts * rows, cols];
        let is_transposed = may_be_transposed && finder.find(&name)?.info.shape != stacked;
        let shape = if is_transposed { [experts.num_experts, cols, num_parts * rows] } else { stacked };
        let dtype = finder.shaped(&name, &shape)?.info.dtype;
        if is_transposed && dtype.is_quantized() {
            return Err(Error::BadSetting {
                key: format!("tensor \"{name}\""),
                expected: "an unquantized format, because the matrix is transposed".into(),
                found: dtype.to_string(),
            });
        }
        Ok(Some(ExpertStack { name, dtype, rows, cols, num_parts, part, is_transposed }))
    }

    /// Returns the matrix of one expert, `[rows][cols]`, from the bytes of the whole tensor.
    pub(crate) fn matrix(&self, tensor: &SharedBytes, expert: usize) -> SharedBytes {
        let ExpertStack { rows, cols, num_parts, part, .. } = *self;
        let of_expert = num_parts * rows * cols / self.dtype.block_len() * self.dtype.block_bytes();
        let start = expert * of_expert;
        if !self.is_transposed {
            let len = of_expert / num_parts;
            return tensor.slice(start + part * len..start + (part + 1) * len).expect("the shape was checked");
        }
        let size = self.dtype.block_bytes();
        let mut matrix = Vec::with_capacity(rows * cols * size);
        for row in 0..rows {
            for col in 0..cols {
                let at = start + (col * num_parts * rows + part * rows + row) * size;
                matrix.extend_from_slice(&tensor[at..at + size]);
            }
        }
        matrix.into()
    }
}
