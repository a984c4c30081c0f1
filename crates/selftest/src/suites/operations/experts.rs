//! Expert MLPs: routing, the MLP of each selected expert, and their weighted sum.

use pellucid_tensor::{Activation, DType, ExpertMlp, Extension, GatedMlp, Output, PlainMlp, Routing, Scoring};

use super::elementwise::{exact, exact_clamped_swiglu};
use crate::suites::harness::Harness;
use crate::suites::tolerance::{ROUNDING, close, dot};

const HIDDEN: usize = 24;
const WIDTH: usize = 10;
const ROWS: usize = 9;

pub(super) fn experts(harness: &mut Harness<'_>) {
    let layer = Layer::new(harness, 5);
    for (num_selected, normalize) in [(2, true), (3, false), (5, true)] {
        let weights = |logits: &[f32]| {
            let scores = logits.iter().map(|&logit| f64::from(logit).exp()).collect::<Vec<_>>();
            let sum: f64 = scores.iter().sum();
            let ranks = logits.iter().map(|&logit| f64::from(logit)).collect();
            let scores = scores.into_iter().map(|score| score / sum).collect();
            weights_of(scores, ranks, num_selected, normalize, 1.0)
        };
        let routing = Routing::softmax(num_selected, normalize);
        layer.check(harness, routing, [None; 2], Activation::Silu, &weights);
        if harness.backend.supports(Extension::ClampedSwiglu) {
            layer.check(harness, routing, [None; 2], Activation::ClampedSwiglu, &weights);
        }
        if harness.backend.supports(Extension::ExpertScales) {
            let factors = harness.random.normals(5);
            let scaled = |logits: &[f32]| {
                let weights = weights(logits).into_iter();
                weights.map(|(expert, weight)| (expert, weight * f64::from(factors[expert]))).collect()
            };
            layer.check(harness, routing, [None, Some(&factors)], Activation::Silu, &scaled);
        }
    }
}

/// Scores by sigmoids with a bias for the selection, from all experts and from the better two of four groups.
pub(super) fn sigmoid_experts(harness: &mut Harness<'_>) {
    if !harness.backend.supports(Extension::SigmoidRouter) {
        return;
    }
    let layer = Layer::new(harness, 12);
    let bias = harness.random.normals(12);
    for (groups, normalize) in [(None, true), (Some((4, 2)), true), (Some((4, 2)), false)] {
        let routing = Routing { scoring: Scoring::Sigmoid, scale: 2.5, groups, ..Routing::softmax(3, normalize) };
        let weights = |logits: &[f32]| {
            let scores: Vec<f64> = logits.iter().map(|&logit| 1.0 / (1.0 + f64::from(-logit).exp())).collect();
            let mut ranks: Vec<f64> = scores.iter().zip(&bias).map(|(score, &bias)| score + f64::from(bias)).collect();
            if groups.is_some() {
                let two_highest = |ranks: &[f64]| {
                    let mut sorted = ranks.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    sorted[0] + sorted[1]
                };
                let mut order: Vec<(usize, f64)> = ranks.chunks(3).map(two_highest).enumerate().collect();
                order.sort_by(|a, b| b.1.total_cmp(&a.1));
                for &(group, _) in &order[2..] {
                    ranks[3 * group..][..3].fill(f64::NEG_INFINITY);
                }
            }
            weights_of(scores, ranks, 3, normalize, 2.5)
        };
        layer.check(harness, routing, [Some(&bias), None], Activation::Silu, &weights);
    }
}

/// Experts of an up and a down projection, with squared ReLU between them.
pub(super) fn plain_experts(harness: &mut Harness<'_>) {
    const NUM_EXPERTS: usize = 5;
    if !harness.backend.supports(Extension::PlainExperts) {
        return;
    }
    let (experts, decoded): (Vec<PlainMlp>, Vec<[Vec<f32>; 2]>) = (0..NUM_EXPERTS)
        .map(|_| {
            let (up, u) = harness.linear(DType::F32, WIDTH, HIDDEN);
            let (down, d) = harness.linear(DType::F32, HIDDEN, WIDTH);
            (PlainMlp { up, down }, [u, d])
        })
        .unzip();
    let (x, logits) = (harness.random.normals(ROWS * HIDDEN), harness.random.normals(ROWS * NUM_EXPERTS));
    let bits = [ROWS, 1].map(|rows_at_once| {
        let mut found = Vec::new();
        for (x, logits) in x.chunks(rows_at_once * HIDDEN).zip(logits.chunks(rows_at_once * NUM_EXPERTS)) {
            let mut out = harness.zeros(x.len() / HIDDEN, HIDDEN);
            let mlp = ExpertMlp {
                x: &harness.activation(x, HIDDEN),
                router_logits: &harness.activation(logits, NUM_EXPERTS),
                routing: Routing::softmax(2, true),
                score_bias: None,
                expert_scales: None,
                experts: &experts[..],
                activation: Activation::SquaredRelu,
            };
            harness.backend.plain_expert_mlp(mlp, Output::Rows(&mut out)).expect("experts");
            found.extend(harness.read(&out));
        }
        let mut expected = Vec::new();
        for (x, logits) in x.chunks_exact(HIDDEN).zip(logits.chunks_exact(NUM_EXPERTS)) {
            let scores = logits.iter().map(|&logit| f64::from(logit).exp()).collect();
            let ranks = logits.iter().map(|&logit| f64::from(logit)).collect();
            let mut sums = vec![0.0; HIDDEN];
            for (expert, weight) in weights_of(scores, ranks, 2, true, 1.0) {
                let [up, down] = &decoded[expert];
                let inner: Vec<f64> =
                    up.chunks_exact(HIDDEN).map(|row| exact(Activation::SquaredRelu, dot(x, row).0)).collect();
                for (sum, row) in sums.iter_mut().zip(down.chunks_exact(WIDTH)) {
                    *sum += weight * row.iter().zip(&inner).map(|(w, inner)| f64::from(*w) * inner).sum::<f64>();
                }
            }
            // The square of a sum of tens of products, each of size tens.
            expected.extend(sums.into_iter().map(|sum| (sum, (sum.abs() + 500.0) * 64.0 * ROUNDING)));
        }
        close("experts without gates", &found, &expected);
        found.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
    });
    assert!(bits[0] == bits[1], "experts without gates give other bits to a row alone");
}

/// An expert and its weight.
type Weighted = (usize, f64);

/// The selected experts.
fn weights_of(scores: Vec<f64>, ranks: Vec<f64>, num_selected: usize, normalize: bool, scale: f64) -> Vec<Weighted> {
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    order.sort_by(|&a, &b| ranks[b].total_cmp(&ranks[a]));
    order.truncate(num_selected);
    let selected: f64 = order.iter().map(|&expert| scores[expert]).sum();
    let divisor = if normalize { selected } else { 1.0 };
    order.into_iter().map(|expert| (expert, scores[expert] / divisor * scale)).collect()
}

/// Experts on a device, and gate, up and down of each in f32.
struct Layer {
    experts: Vec<GatedMlp>,
    decoded: Vec<[Vec<f32>; 3]>,
}

impl Layer {
    fn new(harness: &mut Harness<'_>, num_experts: usize) -> Layer {
        let (experts, decoded) = (0..num_experts)
            .map(|_| {
                let (gate, g) = harness.linear(DType::F32, WIDTH, HIDDEN);
                let (up, u) = harness.linear(DType::F32, WIDTH, HIDDEN);
                let (down, d) = harness.linear(DType::F32, HIDDEN, WIDTH);
                (GatedMlp { gate, up, down }, [g, u, d])
            })
            .unzip();
        Layer { experts, decoded }
    }

    /// Compares the device's result with that of the experts and weights that `weights` gives for the logits of a row.
    /// `bias` is added to the scores for the selection, `factors` are those of the experts' weights.
    fn check(
        &self,
        harness: &mut Harness<'_>,
        routing: Routing,
        [bias, factors]: [Option<&[f32]>; 2],
        activation: Activation,
        weights: &dyn Fn(&[f32]) -> Vec<Weighted>,
    ) {
        let num_experts = self.experts.len();
        let (x, logits) = (harness.random.normals(ROWS * HIDDEN), harness.random.normals(ROWS * num_experts));
        let mut out = harness.zeros(ROWS, HIDDEN);
        let [score_bias, expert_scales] = [bias, factors].map(|values| values.map(|values| harness.vector(values)));
        let mlp = ExpertMlp {
            x: &harness.activation(&x, HIDDEN),
            router_logits: &harness.activation(&logits, num_experts),
            routing,
            score_bias: score_bias.as_ref(),
            expert_scales: expert_scales.as_ref(),
            experts: &self.experts,
            activation,
        };
        harness.backend.expert_mlp(mlp, Output::Rows(&mut out)).expect("experts");
        let mut expected = Vec::new();
        for (x, logits) in x.chunks_exact(HIDDEN).zip(logits.chunks_exact(num_experts)) {
            let mut sums = vec![0.0; HIDDEN];
            for (expert, weight) in weights(logits) {
                let [gate, up, down] = &self.decoded[expert];
                let inner: Vec<f64> = (0..WIDTH)
                    .map(|i| {
                        let row = |w: &[f32]| dot(x, &w[i * HIDDEN..(i + 1) * HIDDEN]).0;
                        match activation {
                            Activation::ClampedSwiglu => exact_clamped_swiglu(row(gate), row(up)),
                            _ => exact(activation, row(gate)) * row(up),
                        }
                    })
                    .collect();
                for (o, sum) in sums.iter_mut().enumerate() {
                    *sum += weight * (0..WIDTH).map(|i| f64::from(down[o * WIDTH + i]) * inner[i]).sum::<f64>();
                }
            }
            // Each value is a sum of tens of products, each of size tens.
            expected.extend(sums.into_iter().map(|sum| (sum, (sum.abs() + 50.0) * 64.0 * ROUNDING)));
        }
        let num_selected = routing.num_selected;
        close(&format!("{num_selected} experts of {num_experts}"), &harness.read(&out), &expected);
    }
}
