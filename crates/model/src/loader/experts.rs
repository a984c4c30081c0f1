//! Finds the matrices of experts: a tensor for each, or a tensor that stacks those of all experts.

use pellucid_tensor::{DType, SharedBytes, quant};

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
    /// `[experts][in][2 * out]`, the columns of gate and up in turn, and `[experts][in][out]` for down. Quantized
    /// matrices are `[experts][2 * out][in]`, the rows of gate and up in turn. The names have no ending, those of
    /// biases the ending `_bias`.
    Interleaved,
    /// A tensor for each expert's matrix, or the shapes of `Stacked` with names that have no ending.
    SeparateOrStacked,
}

/// One of the three matrices of a gated expert, or of the last two of an ungated one.
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
    is_interleaved: bool,
    /// Name of the tensor of biases, if the experts have them.
    bias: Option<String>,
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
            ExpertMatrix::Gate | ExpertMatrix::Up => (experts.mlp_size, config.expert_width()),
            ExpertMatrix::Down => (config.expert_width(), experts.mlp_size),
        };
        let fused = ModulePath::new(names.fused_expert_gate_up, layer);
        let is_stacked = *expert_layout == ExpertLayout::SeparateOrStacked && finder.has(&finder.name(fused, ""));
        let is_fused = match expert_layout {
            ExpertLayout::Separate => finder.exists(fused),
            ExpertLayout::SeparateOrStacked => is_stacked,
            _ => true,
        };
        let (template, num_parts, part) = match matrix {
            ExpertMatrix::Gate if is_fused => (names.fused_expert_gate_up, 2, 0),
            ExpertMatrix::Up if is_fused => (names.fused_expert_gate_up, 2, 1),
            ExpertMatrix::Gate => (names.expert_gate, 1, 0),
            ExpertMatrix::Up => (names.expert_up, 1, 0),
            ExpertMatrix::Down if is_stacked => (names.stacked_expert_down, 1, 0),
            ExpertMatrix::Down => (names.expert_down, 1, 0),
        };
        if template.contains("{expert}") {
            return Ok(None);
        }
        let path = ModulePath::new(template, layer);
        let is_bare = is_stacked || matches!(expert_layout, ExpertLayout::Transposed | ExpertLayout::Interleaved);
        let name = finder.name(path, if is_bare { "" } else { "weight" });
        let bias = if is_bare { format!("{name}_bias") } else { finder.name(path, "bias") };
        let stacked = [experts.num_experts, num_parts * rows, cols];
        let is_interleaved = *expert_layout == ExpertLayout::Interleaved;
        let found = finder.find(&name)?.info;
        // The quantized experts of gpt-oss are `[experts][2 * out][in]`, because blocks lie along the inputs.
        let is_transposed =
            is_bare && !is_stacked && if is_interleaved { !found.dtype.is_quantized() } else { found.shape != stacked };
        let shape = if is_transposed { [experts.num_experts, cols, num_parts * rows] } else { stacked };
        let dtype = finder.shaped(&name, &shape)?.info.dtype;
        if is_transposed && dtype.is_quantized() {
            return Err(Error::BadSetting {
                key: format!("tensor \"{name}\""),
                expected: "an unquantized format, because the matrix is transposed".into(),
                found: dtype.to_string(),
            });
        }
        let bias = experts.biases.then_some(bias);
        Ok(Some(ExpertStack { name, dtype, rows, cols, num_parts, part, is_transposed, is_interleaved, bias }))
    }

    /// Returns the index of a row among those of all matrices of an expert.
    fn offset(&self, row: usize) -> usize {
        if self.is_interleaved { row * self.num_parts + self.part } else { self.part * self.rows + row }
    }

    /// Returns the biases of every expert, if they have any.
    pub(crate) fn biases(
        &self,
        finder: &mut TensorFinder<'_>,
        num_experts: usize,
    ) -> Result<Option<Vec<Vec<f32>>>, Error> {
        let Some(name) = &self.bias else { return Ok(None) };
        let tensor = finder.shaped(name, &[num_experts, self.num_parts * self.rows])?;
        let mut values = vec![0.0; tensor.info.num_elements()];
        quant::decode(tensor.info.dtype, &tensor.bytes(), &mut values);
        let of_expert = |values: &[f32]| (0..self.rows).map(|row| values[self.offset(row)]).collect();
        Ok(Some(values.chunks_exact(self.num_parts * self.rows).map(of_expert).collect()))
    }

    /// Returns the matrix of one expert, `[rows][cols]`, from the bytes of the whole tensor.
    pub(crate) fn matrix(&self, tensor: &SharedBytes, expert: usize) -> SharedBytes {
        let &ExpertStack { rows, cols, num_parts, part, .. } = self;
        let of_expert = num_parts * rows * cols / self.dtype.block_len() * self.dtype.block_bytes();
        let start = expert * of_expert;
        if !self.is_transposed && self.is_interleaved {
            let row_bytes = of_expert / (num_parts * rows);
            let row = |row: usize| &tensor[start + row * row_bytes..start + (row + 1) * row_bytes];
            return (0..rows).flat_map(|i| row(self.offset(i))).copied().collect::<Vec<u8>>().into();
        }
        if !self.is_transposed {
            let len = of_expert / num_parts;
            return tensor.slice(start + part * len..start + (part + 1) * len).expect("the shape was checked");
        }
        let size = self.dtype.block_bytes();
        let mut matrix = Vec::with_capacity(rows * cols * size);
        for row in 0..rows {
            for col in 0..cols {
                let at = start + (col * num_parts * rows + self.offset(row)) * size;
                matrix.extend_from_slice(&tensor[at..at + size]);
            }
        }
        matrix.into()
    }
}
