//! A backend under test with shorthands for what every check does: upload, download, allocate.

use pellucid_tensor::{Backend, DType, HostWeight, Linear, Tensor};

use super::random_data::RandomData;

/// A backend under test with a source of test data.
pub(crate) struct Harness<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) random: RandomData,
}

impl Harness<'_> {
    pub(crate) fn activation(&self, values: &[f32], cols: usize) -> Tensor {
        let mut tensor = self.backend.zeros(DType::F32, values.len() / cols, cols).expect("memory");
        self.backend.write(values, &mut tensor).expect("a write");
        tensor
    }

    pub(crate) fn zeros(&self, rows: usize, cols: usize) -> Tensor {
        self.backend.zeros(DType::F32, rows, cols).expect("memory")
    }

    pub(crate) fn upload(&self, weight: HostWeight) -> Tensor {
        self.backend.weight(weight).expect("an upload")
    }

    pub(crate) fn vector(&self, values: &[f32]) -> Tensor {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.upload(HostWeight { dtype: DType::F32, rows: 1, cols: values.len(), bytes: bytes.into() })
    }

    /// Whether the backend stores keys and values in a format. Every backend must support f32 and f16; others are
    /// optional.
    pub(crate) fn has_kv(&self, dtype: DType) -> bool {
        let has = self.backend.zeros(dtype, 1, dtype.block_len()).is_ok();
        assert!(has || ![DType::F32, DType::F16].contains(&dtype), "keys and values in {dtype}");
        has
    }

    pub(crate) fn read(&self, tensor: &Tensor) -> Vec<f32> {
        let mut values = vec![0.0; tensor.len()];
        self.backend.read(tensor, &mut values).expect("a read");
        values
    }

    pub(crate) fn linear(&mut self, dtype: DType, rows: usize, cols: usize) -> (Linear, Vec<f32>) {
        let (weight, decoded) = self.random.weight(dtype, rows, cols);
        (Linear { weight: self.backend.linear_weight(weight).expect("an upload"), bias: None }, decoded)
    }
}
