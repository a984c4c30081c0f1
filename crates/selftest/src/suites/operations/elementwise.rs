//! Operations on the values of single rows: norms, additions, activations, rotary positions.

use pellucid_tensor::{Activation, Extension, Rope, RopeStyle};

use crate::suites::harness::Harness;
use crate::suites::tolerance::{ROUNDING, close};

pub(super) fn rms_norm(harness: &mut Harness<'_>) {
    for (cols, width) in [(576, 576), (48, 16), (7, 7), (1, 1), (33, 11)] {
        let x = harness.random.normals(3 * cols);
        let weight = harness.random.normals(width);
        let mut out = harness.zeros(3, cols);
        harness
            .backend
            .rms_norm(&harness.activation(&x, cols), &harness.vector(&weight), 1e-5, &mut out)
            .expect("rms norm");
        let expected: Vec<(f64, f64)> = (x.chunks_exact(width))
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                let factor = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
                x.iter().zip(&weight).map(move |(&x, &w)| f64::from(x) * factor * f64::from(w))
            })
            .map(|value| (value, value.abs() * 12.0 * ROUNDING + 1e-9))
            .collect();
        close(&format!("rms norm of {width} in {cols}"), &harness.read(&out), &expected);
    }
}

pub(super) fn layer_norm(harness: &mut Harness<'_>) {
    for cols in [768, 17, 2] {
        let x = harness.random.normals(2 * cols);
        let (weight, bias) = (harness.random.normals(cols), harness.random.normals(cols));
        let mut out = harness.zeros(2, cols);
        let (weight_tensor, bias_tensor) = (harness.vector(&weight), harness.vector(&bias));
        harness
            .backend
            .layer_norm(&harness.activation(&x, cols), &weight_tensor, &bias_tensor, 1e-5, &mut out)
            .expect("norm");
        let expected: Vec<(f64, f64)> = (x.chunks_exact(cols))
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / cols as f64;
                let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / cols as f64;
                let factor = 1.0 / (variance + f64::from(1e-5f32)).sqrt();
                (x.iter().zip(&weight).zip(&bias))
                    .map(move |((&x, &w), &b)| (f64::from(x) - mean) * factor * f64::from(w) + f64::from(b))
            })
            // Values are of order one; subtracting the mean adds a few roundings of the size of x.
            .map(|value| (value, (value.abs() + 4.0) * 16.0 * ROUNDING))
            .collect();
        close(&format!("layer norm of {cols}"), &harness.read(&out), &expected);
    }
}

pub(super) fn add_and_cap(harness: &mut Harness<'_>) {
    let (x, y) = (harness.random.normals(2 * 45), harness.random.normals(2 * 45));
    let mut sum = harness.activation(&x, 45);
    harness.backend.add(&harness.activation(&y, 45), &mut sum).expect("add");
    assert_eq!(harness.read(&sum), x.iter().zip(&y).map(|(x, y)| x + y).collect::<Vec<_>>());

    let wide: Vec<f32> = x.iter().map(|x| x * 40.0).collect();
    let mut capped = harness.activation(&wide, 45);
    harness.backend.soft_cap(30.0, &mut capped).expect("soft cap");
    let expected: Vec<(f64, f64)> = wide.iter().map(|&x| (30.0 * (f64::from(x) / 30.0).tanh(), 30.0 * 4e-7)).collect();
    close("soft cap", &harness.read(&capped), &expected);
}

pub(super) fn exact(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt())),
        Activation::ClampedSwiglu => unreachable!("only gates have it"),
        Activation::SquaredRelu => x.max(0.0).powi(2),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
    }
}

pub(super) fn activations(harness: &mut Harness<'_>) {
    let rarer = harness.backend.supports(Extension::SquaredRelu).then_some(Activation::SquaredRelu);
    for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh].into_iter().chain(rarer) {
        let x: Vec<f32> = harness.random.normals(3 * 101).iter().map(|x| x * 4.0).collect();
        let up = harness.random.normals(3 * 101);
        let value = |x: f32| exact(activation, f64::from(x));
        let bound = |x: f32| (f64::from(x.abs()) + 0.1) * 16.0 * ROUNDING;

        let mut plain = harness.activation(&x, 101);
        harness.backend.activate(activation, &mut plain).expect("activate");
        let expected: Vec<(f64, f64)> = x.iter().map(|&x| (value(x), bound(x))).collect();
        close(&format!("{activation:?}"), &harness.read(&plain), &expected);

        let mut gated = harness.activation(&x, 101);
        harness.backend.gate(activation, &harness.activation(&up, 101), &mut gated).expect("gate");
        let expected: Vec<(f64, f64)> = (x.iter().zip(&up))
            .map(|(&x, &up)| (value(x) * f64::from(up), bound(x) * (f64::from(up.abs()) + 0.1)))
            .collect();
        close(&format!("gate with {activation:?}"), &harness.read(&gated), &expected);
    }
}

/// `x sigmoid(1.702 x) (up + 1)`, with x at most 7 and up from -7 to 7.
pub(super) fn exact_clamped_swiglu(x: f64, up: f64) -> f64 {
    let x = x.min(7.0);
    x / (1.0 + (-1.702 * x).exp()) * (up.clamp(-7.0, 7.0) + 1.0)
}

pub(super) fn clamped_swiglu(harness: &mut Harness<'_>) {
    if !harness.backend.supports(Extension::ClampedSwiglu) {
        return;
    }
    let [x, up] = [(); 2].map(|()| harness.random.normals(3 * 101).iter().map(|x| x * 6.0).collect::<Vec<f32>>());
    let mut gated = harness.activation(&x, 101);
    harness.backend.gate(Activation::ClampedSwiglu, &harness.activation(&up, 101), &mut gated).expect("gate");
    // The exponent of a large negative x is off by a rounding of its own size.
    let bound = |x: f32| (f64::from(x.abs()) + 0.1) * 16.0 * ROUNDING * 8.0;
    let expected: Vec<(f64, f64)> =
        x.iter().zip(&up).map(|(&x, &up)| (exact_clamped_swiglu(f64::from(x), f64::from(up)), bound(x))).collect();
    close("gate with ClampedSwiglu", &harness.read(&gated), &expected);
}

/// Sigmoid gates of a row and of each value, gates with columns of a wider tensor, and factors.
pub(super) fn gates_by_columns(harness: &mut Harness<'_>) {
    const COLS: usize = 101;
    let [x, y] = [(); 2].map(|()| harness.random.normals(3 * COLS).iter().map(|x| x * 3.0).collect::<Vec<f32>>());
    let inputs = harness.random.normals(3 * 4 * COLS);
    let bound = |x: f64| (x.abs() + 0.1) * 32.0 * ROUNDING;
    if harness.backend.supports(Extension::SigmoidGates) {
        let sigmoid = |x: f32| 1.0 / (1.0 + f64::from(-x).exp());
        for cols in [1, COLS] {
            let mut gated = harness.activation(&x, COLS);
            harness.backend.sigmoid_gate(&harness.activation(&y[..3 * cols], cols), &mut gated).expect("a gate");
            let gate = |i: usize| y[if cols == 1 { i / COLS } else { i }];
            let value = |(i, &x): (usize, &f32)| f64::from(x) * sigmoid(gate(i));
            let expected: Vec<_> = x.iter().enumerate().map(value).map(|value| (value, bound(value))).collect();
            close(&format!("sigmoid gate of {cols} columns"), &harness.read(&gated), &expected);
        }
    }
    if harness.backend.supports(Extension::LayerInputs) {
        let mut gated = harness.activation(&x, COLS);
        let wide = harness.activation(&inputs, 4 * COLS);
        harness.backend.gate_by_columns(Activation::GeluTanh, &wide, 2 * COLS, &mut gated).expect("a gate");
        let by = |i: usize| f64::from(inputs[i / COLS * 4 * COLS + 2 * COLS + i % COLS]);
        let value = |(i, &x): (usize, &f32)| exact(Activation::GeluTanh, f64::from(x)) * by(i);
        let expected: Vec<_> =
            x.iter().enumerate().map(|(i, x)| (value((i, x)), bound(f64::from(*x) * by(i)))).collect();
        close("gate by columns", &harness.read(&gated), &expected);
    }
    if harness.backend.supports(Extension::LayerScales) {
        let mut scaled = harness.activation(&x, COLS);
        harness.backend.scale(0.3, &mut scaled).expect("a factor");
        assert_eq!(harness.read(&scaled), x.iter().map(|x| 0.3 * x).collect::<Vec<_>>());
    }
}

pub(super) fn rope(harness: &mut Harness<'_>) {
    let positions = [0u32, 1, 77, 131_071];
    for (head_size, pairs) in [(64, 32), (80, 40), (96, 36), (10, 3)] {
        let frequencies: Vec<f32> = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / pairs as f32)).collect();
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            let cols = 3 * head_size;
            let x = harness.random.normals(positions.len() * cols);
            let mut angles = harness.zeros(positions.len(), 2 * pairs);
            harness.backend.rope_angles(&positions, &frequencies, 1.25, &mut angles).expect("angles");
            let mut rotated = harness.activation(&x, cols);
            harness.backend.rope(Rope { angles: &angles, head_size, style }, &mut rotated).expect("rope");
            let mut expected: Vec<(f64, f64)> = x.iter().map(|&x| (f64::from(x), 0.0)).collect();
            for (row, &position) in positions.iter().enumerate() {
                for head in 0..3 {
                    for (i, &frequency) in frequencies.iter().enumerate() {
                        let start = row * cols + head * head_size;
                        let (a, b) = match style {
                            RopeStyle::Half => (start + i, start + i + pairs),
                            RopeStyle::Interleaved => (start + 2 * i, start + 2 * i + 1),
                        };
                        // Like the reference, the backends round the angle to f32 before they take the cosine.
                        let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                        let (u, v) = (f64::from(x[a]), f64::from(x[b]));
                        let bound = (u.abs() + v.abs()) * 1.25 * 4.0 * ROUNDING;
                        expected[a] = (1.25 * (u * cos - v * sin), bound);
                        expected[b] = (1.25 * (v * cos + u * sin), bound);
                    }
                }
            }
            close(&format!("rope {style:?} of {pairs} pairs in {head_size}"), &harness.read(&rotated), &expected);
        }
    }
}
