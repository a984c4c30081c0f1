//! Loads the layer that predicts further tokens.

use pellucid_tensor::{DType, HostWeight, Linear, SharedBytes, quant};

use super::Loader;
use super::tensor_finder::ModulePath;
use crate::Error;
use crate::weights::PredictorWeights;

impl Loader<'_> {
    pub(super) fn predictor(&mut self) -> Result<PredictorWeights, Error> {
        let (names, config) = (&self.blueprint.names, &self.blueprint.config);
        let (layer, hidden) = (config.num_layers(), config.hidden_size);
        let join = self.finder.name(ModulePath::new(names.predictor_join, layer), "weight");
        let join = self.host(&join, hidden, 2 * hidden)?;
        let [from_embedding, from_hidden] = halves(&join).map(|weight| self.backend.linear_weight(weight));
        Ok(PredictorWeights {
            embedding_norm: self.norm(ModulePath::new(names.predictor_embedding_norm, layer), hidden)?,
            hidden_norm: self.norm(ModulePath::new(names.predictor_hidden_norm, layer), hidden)?,
            from_embedding: Linear { weight: from_embedding?, bias: None },
            from_hidden: Linear { weight: from_hidden?, bias: None },
            layer: self.layer(layer)?,
            output_norm: self.norm(ModulePath::new(names.predictor_output_norm, layer), hidden)?,
        })
    }
}

/// Returns the left and the right columns of a matrix. If a block of its format has columns of both, they are decoded.
fn halves(matrix: &HostWeight) -> [HostWeight; 2] {
    let &HostWeight { dtype, rows, cols, ref bytes } = matrix;
    let half = cols / 2;
    if dtype.bytes_for(half).is_some() {
        return [0, 1].map(|side| columns(bytes, dtype, (rows, half), side));
    }
    let mut values = vec![0.0; rows * cols];
    quant::decode(dtype, bytes, &mut values);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    [0, 1].map(|side| columns(&bytes, DType::F32, (rows, half), side))
}

/// Returns every second group of `cols` values, from `side` on.
fn columns(bytes: &[u8], dtype: DType, (rows, cols): (usize, usize), side: usize) -> HostWeight {
    let len = dtype.bytes_for(cols).expect("columns are whole blocks");
    let bytes: Vec<u8> = bytes.chunks_exact(len).skip(side).step_by(2).flatten().copied().collect();
    HostWeight { dtype, rows, cols, bytes: SharedBytes::from(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_cut_between_its_columns() {
        let values: Vec<f32> = (0..2 * 64).map(|value| value as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let matrix = HostWeight { dtype: DType::F32, rows: 2, cols: 64, bytes: bytes.into() };
        let [left, right] = halves(&matrix);
        let first = |weight: &HostWeight, row: usize| {
            let at = &weight.bytes[row * 32 * 4..][..4];
            f32::from_le_bytes(at.try_into().unwrap())
        };
        assert_eq!([first(&left, 0), first(&left, 1)], [0.0, 64.0]);
        assert_eq!([first(&right, 0), first(&right, 1)], [32.0, 96.0]);
        assert_eq!((left.rows, left.cols, right.cols), (2, 32, 32));
        // A block of Q8_0 has 32 values: these are cut through.
        let blocks = HostWeight { dtype: DType::Q8_0, rows: 1, cols: 32, bytes: vec![0; 34].into() };
        assert_eq!(halves(&blocks).map(|half| (half.dtype, half.cols)), [(DType::F32, 16); 2]);
    }
}
