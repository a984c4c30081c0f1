//! One suite for every backend: each operation against its formula, written here in f64 with no regard for speed.
//!
//! A tolerance is stated with each check, as a multiple of the rounding that the operation's sums allow.

use pellucid_model::KvMemory;
use pellucid_tensor::{
    Activation, Attention, Backend, DType, ExpertMlp, GatedMlp, HeadShape, HostWeight, KvLayer, Linear, Rope,
    RopeStyle, Routing, SequenceSpan, StoreKv, Tensor, quant,
};

/// The relative size of one f32 rounding.
const ROUNDING: f64 = 6e-8;

/// A deterministic source of test numbers.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Roughly normal: the sum of four uniform numbers, scaled to unit variance.
    fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| self.next() as f64 / u64::MAX as f64 - 0.5).sum();
        (sum * 3f64.sqrt()) as f32
    }

    pub(crate) fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// Bytes of any format whose decoded numbers are finite and not too unequal.
    pub(crate) fn weight(&mut self, dtype: DType, rows: usize, cols: usize) -> (HostWeight, Vec<f32>) {
        self.weight_scaled(dtype, rows, cols, MODEST)
    }

    /// With scales of that size where the format has them.
    fn weight_scaled(&mut self, dtype: DType, rows: usize, cols: usize, scales: ScaleBits) -> (HostWeight, Vec<f32>) {
        let bytes: Vec<u8> = match dtype {
            DType::F32 => self.normals(rows * cols).iter().flat_map(|value| value.to_le_bytes()).collect(),
            DType::BF16 => {
                (0..rows * cols).flat_map(|_| ((self.normal().to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
            // Sign, an exponent of 2^-3 to 1, any mantissa.
            DType::F16 => (0..rows * cols)
                .flat_map(|_| {
                    let bits = self.next() as u16;
                    ((bits & 0x83FF) | (12 + (bits >> 13) % 4) << 10).to_le_bytes()
                })
                .collect(),
            _ => {
                let len = dtype.bytes_for(rows * cols).expect("whole blocks");
                let mut bytes: Vec<u8> = (0..len).map(|_| self.next() as u8).collect();
                tame_scales(dtype, &mut bytes, scales);
                bytes
            }
        };
        let mut decoded = vec![0.0; rows * cols];
        quant::decode(dtype, &bytes, &mut decoded);
        assert!(decoded.iter().all(|value| value.is_finite()), "{dtype}: test weights are finite");
        (HostWeight { dtype, rows, cols, bytes: bytes.into() }, decoded)
    }
}

/// The bits of an f16 scale that all have in common, in its upper byte.
type ScaleBits = u8;

/// 2^-8 to 2^-7, as a quantizer would choose them.
const MODEST: ScaleBits = 0x1c;
/// 4 to 8: more than any model has.
const LARGE: ScaleBits = 0x44;

/// Gives the f16 scales of each block their size; the rest of the block may be any bytes.
fn tame_scales(dtype: DType, bytes: &mut [u8], scales: ScaleBits) {
    let places: &[usize] = match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL | DType::IQ4_XS => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        // One byte of exponent.
        DType::MXFP4 => &[],
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("plain formats have no scales"),
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &place in places {
            block[place + 1] = scales | (block[place + 1] & 0x83);
        }
        if dtype == DType::MXFP4 {
            block[0] = 122 + block[0] % 4;
        }
    }
}

/// A backend under test, with shorthands.
pub(crate) struct Suite<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) numbers: Numbers,
}

type Check = fn(&mut Suite<'_>);

const CHECKS: [(&str, Check); 9] = [
    ("linear, every format", linear),
    ("embed and gather", embed),
    ("rms norm, rows and heads", rms_norm),
    ("layer norm", layer_norm),
    ("add and soft cap", add_and_cap),
    ("activations and gates", activations),
    ("rope, both styles", rope),
    ("paged attention", attention),
    ("experts", experts),
];

/// Runs the suite and gives the names of its checks. Panics at the first that fails, with what differed.
pub fn run(backend: &dyn Backend) -> Vec<&'static str> {
    let mut suite = Suite { backend, numbers: Numbers(1) };
    CHECKS
        .into_iter()
        .map(|(name, check)| {
            check(&mut suite);
            name
        })
        .collect()
}

/// The names of the suite's checks, and a way to run each by itself.
pub fn checks() -> impl Iterator<Item = (&'static str, impl Fn(&dyn Backend))> {
    CHECKS
        .into_iter()
        .map(|(name, check)| (name, move |backend: &dyn Backend| check(&mut Suite { backend, numbers: Numbers(1) })))
}

/// Whether products with BF16 weights round their input to 16 bits first, as tensor cores and AMX tiles do.
pub fn rounds_activations(backend: &dyn Backend) -> bool {
    let suite = Suite { backend, numbers: Numbers(1) };
    let cols = 64;
    let bytes: Vec<u8> = (0..cols).flat_map(|_| 0x3f80u16.to_le_bytes()).collect();
    let weight = HostWeight { dtype: DType::BF16, rows: 1, cols, bytes: bytes.into() };
    let linear = Linear { weight: backend.linear_weight(weight).expect("an upload"), bias: None };
    let mut x = vec![0.0; cols];
    // Four bits more than bf16 has.
    x[0] = 1.0 + 2f32.powi(-12);
    let mut out = suite.zeros(1, 1);
    backend.linear(&suite.activation(&x, cols), &linear, &mut out).expect("a product");
    suite.read(&out)[0] != x[0]
}

impl Suite<'_> {
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

    /// Whether the backend stores keys and values in a format. Every one does in f32 and f16; the others it may refuse.
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
        let (weight, decoded) = self.numbers.weight(dtype, rows, cols);
        (Linear { weight: self.backend.linear_weight(weight).expect("an upload"), bias: None }, decoded)
    }
}

/// Every number within its own bound.
fn close(what: &str, found: &[f32], expected: &[(f64, f64)]) {
    assert_eq!(found.len(), expected.len(), "{what}: number of results");
    for (i, (&found, &(expected, bound))) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(found) - expected).abs();
        assert!(
            difference <= bound,
            "{what}: number {i} is {found}, expected {expected}, off by {difference:e} > {bound:e}"
        );
    }
}

/// A dot product in f64, and how far an f32 sum of any order may be off.
fn dot(x: &[f32], w: &[f32]) -> (f64, f64) {
    let products = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
    (sum, size * ROUNDING * (x.len() as f64).sqrt().max(4.0) * 2.0)
}

/// The sum of the magnitudes of a dot product's terms.
fn size_of_dot(x: &[f32], w: &[f32]) -> f64 {
    x.iter().zip(w).map(|(&x, &w)| (f64::from(x) * f64::from(w)).abs()).sum()
}

/// How far rounding the activations of a product may take it. With quantized weights a backend may round them to 8 bits, in groups of
/// at most 256 numbers: an error is then uniform within half a step of its group, and their weighted sum stays within six times its
/// standard deviation. With weights of 16 bits it may round each to the weights' own format.
fn activation_rounding(dtype: DType, x: &[f32], w: &[f32]) -> f64 {
    match dtype {
        DType::F32 => return 0.0,
        DType::F16 => return size_of_dot(x, w) * 2f64.powi(-11),
        DType::BF16 => return size_of_dot(x, w) * 2f64.powi(-8),
        _ => {}
    }
    let variance = x.chunks(256).zip(w.chunks(256)).map(|(x, w)| {
        let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let step = f64::from(largest) / 127.0;
        step * step / 12.0 * w.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
    });
    6.0 * variance.sum::<f64>().sqrt()
}

fn linear(suite: &mut Suite<'_>) {
    for dtype in DType::ALL {
        // Odd numbers of rows and columns around the kernels' tiles; every format at two depths.
        let unit = dtype.block_len();
        let depths = if unit == 1 { vec![1, 17, 96, 300] } else { vec![unit, 3 * unit] };
        for cols in depths {
            for (num_rows, num_outputs) in [(1, 1), (1, 37), (7, 5), (13, 64), (70, 40)] {
                product(suite, dtype, [num_rows, cols, num_outputs], MODEST);
            }
        }
        if unit > 1 {
            product(suite, dtype, [2, 2 * unit, 37], LARGE);
        }
    }
}

fn product(suite: &mut Suite<'_>, dtype: DType, [num_rows, cols, num_outputs]: [usize; 3], scales: ScaleBits) {
    let mut x = suite.numbers.normals(num_rows * cols);
    // One row is beyond the range of f16.
    if num_rows > 7 && cols > 17 {
        x[5 * cols..6 * cols].iter_mut().for_each(|x| *x *= 1e5);
    }
    let bias = suite.numbers.normals(num_outputs);
    let (weight, decoded) = suite.numbers.weight_scaled(dtype, num_outputs, cols, scales);
    let weight = suite.backend.linear_weight(weight).expect("an upload");
    let linear = Linear { weight, bias: Some(suite.vector(&bias)) };
    let mut out = suite.zeros(num_rows, num_outputs);
    suite.backend.linear(&suite.activation(&x, cols), &linear, &mut out).expect("linear");
    let expected: Vec<(f64, f64)> = (x.chunks_exact(cols))
        .flat_map(|x| decoded.chunks_exact(cols).zip(&bias).map(move |(w, bias)| (x, w, bias)))
        .map(|(x, w, &bias)| {
            let (sum, bound) = dot(x, w);
            let bound = bound + ROUNDING * (sum.abs() + f64::from(bias.abs()));
            (sum + f64::from(bias), bound + activation_rounding(dtype, x, w))
        })
        .collect();
    close(&format!("linear {dtype} {num_rows}x{cols}x{num_outputs}"), &suite.read(&out), &expected);
}

fn embed(suite: &mut Suite<'_>) {
    for dtype in DType::ALL {
        let cols = dtype.block_len() * 2;
        let (weight, decoded) = suite.numbers.weight(dtype, 9, cols);
        let table = suite.upload(weight);
        let ids = [8, 0, 3, 3];
        let mut out = suite.zeros(4, cols);
        suite.backend.embed(&table, &ids, 2.5, &mut out).expect("embed");
        let row = |id: u32| decoded[id as usize * cols..][..cols].iter();
        let expected: Vec<(f64, f64)> = (ids.iter())
            .flat_map(|&id| row(id))
            .map(|&value| (f64::from(value) * 2.5, f64::from(value.abs()) * 2.5 * ROUNDING))
            .collect();
        close(&format!("embed {dtype}"), &suite.read(&out), &expected);
    }
    let x = suite.numbers.normals(5 * 3);
    let mut out = suite.zeros(2, 3);
    suite.backend.gather_rows(&suite.activation(&x, 3), &[4, 1], &mut out).expect("gather");
    assert_eq!(suite.read(&out), [&x[12..15], &x[3..6]].concat());
}

fn rms_norm(suite: &mut Suite<'_>) {
    for (cols, width) in [(576, 576), (48, 16), (7, 7), (1, 1), (33, 11)] {
        let x = suite.numbers.normals(3 * cols);
        let weight = suite.numbers.normals(width);
        let mut out = suite.zeros(3, cols);
        suite.backend.rms_norm(&suite.activation(&x, cols), &suite.vector(&weight), 1e-5, &mut out).expect("rms norm");
        let expected: Vec<(f64, f64)> = (x.chunks_exact(width))
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                let factor = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
                x.iter().zip(&weight).map(move |(&x, &w)| f64::from(x) * factor * f64::from(w))
            })
            .map(|value| (value, value.abs() * 12.0 * ROUNDING + 1e-9))
            .collect();
        close(&format!("rms norm of {width} in {cols}"), &suite.read(&out), &expected);
    }
}

fn layer_norm(suite: &mut Suite<'_>) {
    for cols in [768, 17, 2] {
        let x = suite.numbers.normals(2 * cols);
        let (weight, bias) = (suite.numbers.normals(cols), suite.numbers.normals(cols));
        let mut out = suite.zeros(2, cols);
        let (weight_tensor, bias_tensor) = (suite.vector(&weight), suite.vector(&bias));
        suite
            .backend
            .layer_norm(&suite.activation(&x, cols), &weight_tensor, &bias_tensor, 1e-5, &mut out)
            .expect("norm");
        let expected: Vec<(f64, f64)> = (x.chunks_exact(cols))
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / cols as f64;
                let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / cols as f64;
                let factor = 1.0 / (variance + f64::from(1e-5f32)).sqrt();
                (x.iter().zip(&weight).zip(&bias))
                    .map(move |((&x, &w), &b)| (f64::from(x) - mean) * factor * f64::from(w) + f64::from(b))
            })
            // Of order one; the difference from the mean loses a few roundings of x's own size.
            .map(|value| (value, (value.abs() + 4.0) * 16.0 * ROUNDING))
            .collect();
        close(&format!("layer norm of {cols}"), &suite.read(&out), &expected);
    }
}

fn add_and_cap(suite: &mut Suite<'_>) {
    let (x, y) = (suite.numbers.normals(2 * 45), suite.numbers.normals(2 * 45));
    let mut sum = suite.activation(&x, 45);
    suite.backend.add(&suite.activation(&y, 45), &mut sum).expect("add");
    assert_eq!(suite.read(&sum), x.iter().zip(&y).map(|(x, y)| x + y).collect::<Vec<_>>());

    let wide: Vec<f32> = x.iter().map(|x| x * 40.0).collect();
    let mut capped = suite.activation(&wide, 45);
    suite.backend.soft_cap(30.0, &mut capped).expect("soft cap");
    let expected: Vec<(f64, f64)> = wide.iter().map(|&x| (30.0 * (f64::from(x) / 30.0).tanh(), 30.0 * 4e-7)).collect();
    close("soft cap", &suite.read(&capped), &expected);
}

fn exact(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt())),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
    }
}

fn activations(suite: &mut Suite<'_>) {
    for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
        let x: Vec<f32> = suite.numbers.normals(3 * 101).iter().map(|x| x * 4.0).collect();
        let up = suite.numbers.normals(3 * 101);
        let value = |x: f32| exact(activation, f64::from(x));
        let bound = |x: f32| (f64::from(x.abs()) + 0.1) * 16.0 * ROUNDING;

        let mut plain = suite.activation(&x, 101);
        suite.backend.activate(activation, &mut plain).expect("activate");
        let expected: Vec<(f64, f64)> = x.iter().map(|&x| (value(x), bound(x))).collect();
        close(&format!("{activation:?}"), &suite.read(&plain), &expected);

        let mut gated = suite.activation(&x, 101);
        suite.backend.gate(activation, &suite.activation(&up, 101), &mut gated).expect("gate");
        let expected: Vec<(f64, f64)> = (x.iter().zip(&up))
            .map(|(&x, &up)| (value(x) * f64::from(up), bound(x) * (f64::from(up.abs()) + 0.1)))
            .collect();
        close(&format!("gate with {activation:?}"), &suite.read(&gated), &expected);
    }
}

fn rope(suite: &mut Suite<'_>) {
    let positions = [0u32, 1, 77, 131_071];
    for (head_size, pairs) in [(64, 32), (80, 40), (96, 36), (10, 3)] {
        let frequencies: Vec<f32> = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / pairs as f32)).collect();
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            let cols = 3 * head_size;
            let x = suite.numbers.normals(positions.len() * cols);
            let mut angles = suite.zeros(positions.len(), 2 * pairs);
            suite.backend.rope_angles(&positions, &frequencies, 1.25, &mut angles).expect("angles");
            let mut turned = suite.activation(&x, cols);
            suite.backend.rope(Rope { angles: &angles, head_size, style }, &mut turned).expect("rope");
            let mut expected: Vec<(f64, f64)> = x.iter().map(|&x| (f64::from(x), 0.0)).collect();
            for (row, &position) in positions.iter().enumerate() {
                for head in 0..3 {
                    for (i, &frequency) in frequencies.iter().enumerate() {
                        let start = row * cols + head * head_size;
                        let (a, b) = match style {
                            RopeStyle::Half => (start + i, start + i + pairs),
                            RopeStyle::Interleaved => (start + 2 * i, start + 2 * i + 1),
                        };
                        // The reference rounds the angle to f32 before it takes the cosine, and so do we.
                        let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                        let (u, v) = (f64::from(x[a]), f64::from(x[b]));
                        let bound = (u.abs() + v.abs()) * 1.25 * 4.0 * ROUNDING;
                        expected[a] = (1.25 * (u * cos - v * sin), bound);
                        expected[b] = (1.25 * (v * cos + u * sin), bound);
                    }
                }
            }
            close(&format!("rope {style:?} of {pairs} pairs in {head_size}"), &suite.read(&turned), &expected);
        }
    }
}

/// One way to attend.
#[derive(Debug, Clone, Copy)]
struct AttentionCase {
    dtype: DType,
    shape: HeadShape,
    window: Option<usize>,
    soft_cap: Option<f32>,
}

fn attention(suite: &mut Suite<'_>) {
    let sizes = [(4, 2, 64), (3, 1, 80), (2, 2, 96), (8, 2, 128), (4, 4, 256), (3, 3, 5)];
    for (num_heads, num_kv_heads, head_size) in sizes {
        for dtype in KvMemory::FORMATS.into_iter().filter(|dtype| dtype.bytes_for(head_size).is_some()) {
            if !suite.has_kv(dtype) {
                continue;
            }
            let shape = HeadShape { num_heads, num_kv_heads, head_size, block_len: 8 };
            let plain = AttentionCase { dtype, shape, window: None, soft_cap: None };
            attend_case(suite, &plain);
            attend_case(suite, &AttentionCase { window: Some(11), ..plain });
            attend_case(suite, &AttentionCase { window: Some(1), soft_cap: Some(2.0), ..plain });
            attend_case(suite, &AttentionCase { shape: HeadShape { block_len: 32, ..shape }, ..plain });
            if matches!(dtype, DType::F16 | DType::Q8_0) {
                overflow(suite, dtype, head_size);
            }
        }
    }
}

/// A key beyond the range of its format has no finite place in anybody's attention: it must not get the weight zero and vanish.
fn overflow(suite: &mut Suite<'_>, dtype: DType, head_size: usize) {
    const LEN: usize = 40;
    let shape = HeadShape { num_heads: 2, num_kv_heads: 1, head_size, block_len: 32 };
    let blocks = || suite.backend.zeros(dtype, 2, head_size * shape.block_len).expect("memory");
    let mut kv = KvLayer { keys: blocks(), values: blocks() };
    let mut keys = vec![0.5; LEN * head_size];
    keys[3 * head_size] = -3e38;
    let (keys, values) =
        (suite.activation(&keys, head_size), suite.activation(&[0.25; LEN * 256][..LEN * head_size], head_size));
    let slots: Vec<u32> = (0..LEN as u32).collect();
    suite.backend.store_kv(StoreKv { keys: &keys, values: &values, slots: &slots, shape }, &mut kv).expect("store");
    // Alone, and as a chunk.
    for positions in [vec![39], (30..40).collect()] {
        let cols = shape.num_heads * head_size;
        let mut out = suite.zeros(positions.len(), cols);
        let attention = Attention {
            queries: &suite.activation(&vec![1.0; positions.len() * cols], cols),
            kv: &kv,
            positions: &positions,
            sequences: &[SequenceSpan { rows: 0..positions.len(), blocks: 0..2 }],
            block_tables: &[0, 1],
            shape,
            scale: 1.0,
            soft_cap: None,
            window: None,
        };
        suite.backend.attention(attention, &mut out).expect("attention");
        assert!(
            suite.read(&out).iter().all(|x| x.is_nan()),
            "{dtype}, heads of {head_size}: a key beyond its range is lost"
        );
    }
}

/// What these numbers are after they were stored.
fn stored(dtype: DType, numbers: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0; dtype.bytes_for(numbers.len()).expect("heads are whole blocks")];
    quant::encode(dtype, numbers, &mut bytes);
    let mut decoded = vec![0.0; numbers.len()];
    quant::decode(dtype, &bytes, &mut decoded);
    decoded
}

/// Two sequences in scattered blocks: one computes its last 3 positions, the other all of its 37 in one chunk.
fn attend_case(suite: &mut Suite<'_>, case: &AttentionCase) {
    let AttentionCase { dtype, shape, window, soft_cap } = *case;
    let HeadShape { num_heads, num_kv_heads, head_size, block_len } = shape;
    let tables: [Vec<u32>; 2] = [vec![9, 2, 7, 4, 11, 0], vec![3, 10, 1, 8, 5]];
    let lens = [43usize, 37];
    let chunk_starts = [40usize, 0];
    let (kv_cols, cols) = (num_kv_heads * head_size, num_heads * head_size);
    let keys = lens.map(|len| suite.numbers.normals(len * kv_cols));
    let values = lens.map(|len| suite.numbers.normals(len * kv_cols));

    let blocks = || suite.backend.zeros(dtype, 12, kv_cols * block_len).expect("memory");
    let mut kv = KvLayer { keys: blocks(), values: blocks() };
    for sequence in 0..2 {
        let slots: Vec<u32> = (0..lens[sequence])
            .map(|position| tables[sequence][position / block_len] * block_len as u32 + (position % block_len) as u32)
            .collect();
        let (keys, values) = (suite.activation(&keys[sequence], kv_cols), suite.activation(&values[sequence], kv_cols));
        suite.backend.store_kv(StoreKv { keys: &keys, values: &values, slots: &slots, shape }, &mut kv).expect("store");
    }

    // Everything after this is exact about what is stored: the rounding of keys and values is the format's own affair.
    let keys = keys.map(|keys| stored(dtype, &keys));
    let values = values.map(|values| stored(dtype, &values));
    let rows: Vec<(usize, usize)> = (0..2).flat_map(|s| (chunk_starts[s]..lens[s]).map(move |p| (s, p))).collect();
    let queries = suite.numbers.normals(rows.len() * cols);
    let scale = 1.0 / (head_size as f32).sqrt();
    let first = lens[0] - chunk_starts[0];
    let attention = Attention {
        queries: &suite.activation(&queries, cols),
        kv: &kv,
        positions: &rows.iter().map(|row| row.1 as u32).collect::<Vec<_>>(),
        sequences: &[
            SequenceSpan { rows: 0..first, blocks: 0..tables[0].len() },
            SequenceSpan { rows: first..rows.len(), blocks: tables[0].len()..tables[0].len() + tables[1].len() },
        ],
        block_tables: &tables.concat(),
        shape,
        scale,
        soft_cap,
        window,
    };
    let mut out = suite.zeros(rows.len(), cols);
    suite.backend.attention(attention, &mut out).expect("attention");

    let mut expected = Vec::new();
    for (row, &(sequence, position)) in rows.iter().enumerate() {
        for head in 0..num_heads {
            let query = &queries[row * cols + head * head_size..][..head_size];
            let kv_head = head / (num_heads / num_kv_heads);
            let at = |p: usize| p * kv_cols + kv_head * head_size;
            let visible = window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1;
            let weights: Vec<f64> = (visible.clone())
                .map(|p| {
                    let score = dot(query, &keys[sequence][at(p)..][..head_size]).0 * f64::from(scale);
                    soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            // With keys and values of 16 bits a backend may round queries and weights to the same format: a score moves by so much of the
            // size of its terms, its weight by as much, and by one rounding more; so does the sum that weights are divided by. What is
            // stored in 8 bits may be multiplied in f16.
            let unit = match dtype {
                DType::F16 | DType::Q8_0 => 2f64.powi(-11),
                DType::BF16 => 2f64.powi(-8),
                _ => 0.0,
            };
            let largest = visible.clone().map(|p| size_of_dot(query, &keys[sequence][at(p)..][..head_size]));
            let kept_rounding = 2.0 * unit * (1.0 + f64::from(scale) * largest.fold(0.0, f64::max));
            for d in 0..head_size {
                let terms =
                    visible.clone().zip(&weights).map(|(p, w)| w / total * f64::from(values[sequence][at(p) + d]));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                // Scores of order one are off by some roundings; so are their exponentials.
                expected.push((sum, (size + 0.01) * 64.0 * ROUNDING + size * kept_rounding));
            }
        }
    }
    close(&format!("attention {case:?}"), &suite.read(&out), &expected);
}

fn experts(suite: &mut Suite<'_>) {
    const HIDDEN: usize = 24;
    const WIDTH: usize = 10;
    const ROWS: usize = 9;
    let (experts, decoded): (Vec<GatedMlp>, Vec<[Vec<f32>; 3]>) = (0..5)
        .map(|_| {
            let (gate, g) = suite.linear(DType::F32, WIDTH, HIDDEN);
            let (up, u) = suite.linear(DType::F32, WIDTH, HIDDEN);
            let (down, d) = suite.linear(DType::F32, HIDDEN, WIDTH);
            (GatedMlp { gate, up, down }, [g, u, d])
        })
        .unzip();
    for (num_selected, normalize) in [(2, true), (3, false), (5, true)] {
        let (x, logits) = (suite.numbers.normals(ROWS * HIDDEN), suite.numbers.normals(ROWS * 5));
        let mut out = suite.zeros(ROWS, HIDDEN);
        let mlp = ExpertMlp {
            x: &suite.activation(&x, HIDDEN),
            router_logits: &suite.activation(&logits, 5),
            routing: Routing { num_selected, normalize },
            experts: &experts,
            activation: Activation::Silu,
        };
        suite.backend.expert_mlp(mlp, &mut out).expect("experts");
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
            // Sums of tens of products of size tens.
            expected.extend(sums.into_iter().map(|sum| (sum, (sum.abs() + 50.0) * 64.0 * ROUNDING)));
        }
        close(&format!("{num_selected} experts of 5"), &suite.read(&out), &expected);
    }
}

/// Matrices of tens of megabytes, which a device may bring in pieces: a column of each, read by a product with a row that is zero but for
/// one number, and a few rows of a table.
pub fn large_weights(backend: &dyn Backend) {
    const OUTPUTS: usize = 2203;
    const COLS: usize = 4096;
    let mut suite = Suite { backend, numbers: Numbers(6) };
    for dtype in [DType::F32, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q6_K, DType::Q4_1] {
        let (weight, decoded) = suite.numbers.weight(dtype, OUTPUTS, COLS);
        let linear = Linear { weight: backend.linear_weight(weight.clone()).expect("an upload"), bias: None };
        for col in [0, 1234, COLS - 1] {
            let mut x = vec![0.0; COLS];
            x[col] = 1.0;
            let mut out = suite.zeros(1, OUTPUTS);
            backend.linear(&suite.activation(&x, COLS), &linear, &mut out).expect("linear");
            // A weight may be rounded to 16 bits, and so may its scale before.
            let bound = |value: f64| (value, value.abs() * 2e-3 + 1e-6);
            let expected: Vec<(f64, f64)> = decoded.chunks_exact(COLS).map(|row| bound(f64::from(row[col]))).collect();
            close(&format!("column {col} of a large matrix of {dtype}"), &suite.read(&out), &expected);
        }
        let ids = [0u32, 2202, 1111, 1023, 1024];
        let mut rows = suite.zeros(ids.len(), COLS);
        backend.embed(&suite.upload(weight), &ids, 1.0, &mut rows).expect("embed");
        let expected: Vec<f32> =
            ids.iter().flat_map(|&id| &decoded[id as usize * COLS..(id as usize + 1) * COLS]).copied().collect();
        assert!(suite.read(&rows) == expected, "rows of a large table of {dtype}");
    }
}
