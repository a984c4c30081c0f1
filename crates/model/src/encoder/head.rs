//! The classifier of a cross-encoder, which scores a pair of texts: `classifier(norm(activation(dense(pooled))))`.
//!
//! It is applied to one row of a text, so plain loops on the host suffice: a millionth of the encoder's work. Sums run
//! in f64, in the order of the columns.

use super::config::ClassifierConfig;
use crate::Pooling;

/// A matrix of `[rows][cols]`, with a bias for each row.
#[derive(Debug)]
pub(super) struct HostLinear {
    pub(super) weight: Vec<f32>,
    pub(super) bias: Vec<f32>,
}

impl HostLinear {
    fn apply(&self, x: &[f32]) -> Vec<f32> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
        let rows = self.weight.chunks_exact(x.len()).zip(&self.bias);
        rows.map(|(row, bias)| (dot(row) + f64::from(*bias)) as f32).collect()
    }
}

/// Function between the two maps of a classifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadActivation {
    Tanh,
    /// x * Phi(x), with the error function
    Gelu,
}

#[derive(Debug)]
pub(super) struct ScoreHead {
    pub(super) config: ClassifierConfig,
    pub(super) dense: HostLinear,
    /// Weight, bias and epsilon of a LayerNorm.
    pub(super) norm: Option<(Vec<f32>, Vec<f32>, f32)>,
    pub(super) classifier: HostLinear,
}

impl ScoreHead {
    pub(super) fn pooling(&self) -> Pooling {
        self.config.pooling
    }

    /// Returns the probability that the classifier gives to a pooled row, from 0 to 1.
    pub(super) fn score(&self, pooled: &[f32]) -> f32 {
        let mut row = self.dense.apply(pooled);
        for value in &mut row {
            let x = f64::from(*value);
            *value = match self.config.activation {
                HeadActivation::Tanh => libm::tanh(x) as f32,
                HeadActivation::Gelu => (0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2))) as f32,
            };
        }
        if let Some((weight, bias, eps)) = &self.norm {
            normalize(&mut row, weight, bias, *eps);
        }
        (1.0 / (1.0 + libm::exp(-f64::from(self.classifier.apply(&row)[0])))) as f32
    }
}

fn normalize(row: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let len = row.len() as f64;
    let mean = row.iter().map(|value| f64::from(*value)).sum::<f64>() / len;
    let variance = row.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / len;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    for ((value, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
        *value = ((f64::from(*value) - mean) * factor * f64::from(*weight) + f64::from(*bias)) as f32;
    }
}
