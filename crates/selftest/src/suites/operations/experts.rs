//! Expert MLPs: routing, the MLP of each selected expert, and their weighted sum.

use pellucid_tensor::{Activation, DType, ExpertMlp, GatedMlp, Output, Routing};

use super::elementwise::exact;
use crate::suites::harness::Harness;
use crate::suites::tolerance::{ROUNDING, close, dot};

pub(super) fn experts(harness: &mut Harness<'_>) {
    const HIDDEN: usize = 24;
    const WIDTH: usize = 10;
    const ROWS: usize = 9;
    let (experts, decoded): (Vec<GatedMlp>, Vec<[Vec<f32>; 3]>) = (0..5)
        .map(|_| {
            let (gate, g) = harness.linear(DType::F32, WIDTH, HIDDEN);
            let (up, u) = harness.linear(DType::F32, WIDTH, HIDDEN);
            let (down, d) = harness.linear(DType::F32, HIDDEN, WIDTH);
            (GatedMlp { gate, up, down }, [g, u, d])
        })
        .unzip();
    for (num_selected, normalize) in [(2, true), (3, false), (5, true)] {
        let (x, logits) = (harness.random.normals(ROWS * HIDDEN), harness.random.normals(ROWS * 5));
        let mut out = harness.zeros(ROWS, HIDDEN);
        let mlp = ExpertMlp {
            x: &harness.activation(&x, HIDDEN),
            router_logits: &harness.activation(&logits, 5),
            routing: Routing::softmax(num_selected, normalize),
            score_bias: None,
            experts: &experts,
            activation: Activation::Silu,
        };
        harness.backend.expert_mlp(mlp, Output::Rows(&mut out)).expect("experts");
        let mut expected = Vec::new();
        for (x, logits) in x.chunks_exact(HIDDEN).zip(logits.chunks_exact(5)) {
            let mut order: Vec<usize> = (0..5).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let all: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let chosen = &order[..num_selected];
            let selected: f64 = chosen.iter().map(|&e| f64::from(logits[e]).exp()).sum();
            let total = if normalize { selected } else { all };
            let mut sums = vec![0.0; HIDDEN];
            for &e in chosen {
                let [gate, up, down] = &decoded[e];
                let inner: Vec<f64> = (0..WIDTH)
                    .map(|i| {
                        let row = |w: &[f32]| dot(x, &w[i * HIDDEN..(i + 1) * HIDDEN]).0;
                        exact(Activation::Silu, row(gate)) * row(up)
                    })
                    .collect();
                for (o, sum) in sums.iter_mut().enumerate() {
                    let y: f64 = (0..WIDTH).map(|i| f64::from(down[o * WIDTH + i]) * inner[i]).sum();
                    *sum += f64::from(logits[e]).exp() / total * y;
                }
            }
            // Each value is a sum of tens of products, each of size tens.
            expected.extend(sums.into_iter().map(|sum| (sum, (sum.abs() + 50.0) * 64.0 * ROUNDING)));
        }
        close(&format!("{num_selected} experts of 5"), &harness.read(&out), &expected);
    }
}
