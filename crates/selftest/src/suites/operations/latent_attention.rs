//! Latent attention: maps of heads, joined heads, and attention whose values are parts of its keys.

use pellucid_model::KvMemory;
use pellucid_tensor::{Attend, DType, Extension, HeadShape, KvLayer, Linear, SequenceSpan, Values};

use super::attention::stored;
use crate::suites::harness::Harness;
use crate::suites::tolerance::{ROUNDING, close, dot, size_of_dot};

/// Rotated values of a key, values of its latent, heads, and positions. The CPU divides positions into spans of 512.
const SIZES: [(usize, usize, usize, usize); 3] = [(4, 7, 3, 1100), (32, 64, 4, 560), (64, 512, 16, 70)];

pub(super) fn latent_attention(harness: &mut Harness<'_>) {
    if !harness.backend.supports(Extension::LatentAttention) {
        return;
    }
    map_heads(harness);
    join_heads(harness);
    for (first, latent, num_heads, len) in SIZES {
        let head_size = first + latent;
        for dtype in KvMemory::FORMATS.into_iter().filter(|dtype| dtype.bytes_for(head_size).is_some()) {
            if harness.has_kv(dtype) {
                let shape = HeadShape { num_heads, num_kv_heads: 1, head_size, block_len: 32 };
                attention(harness, dtype, shape, (first, len));
            }
        }
    }
}

fn map_heads(harness: &mut Harness<'_>) {
    const COLS: usize = 20;
    const OUT_COLS: usize = 37;
    const HEADS: usize = 3;
    let (maps, weights): (Vec<Linear>, Vec<Vec<f32>>) =
        (0..HEADS).map(|_| harness.linear(DType::F32, OUT_COLS, COLS)).unzip();
    for num_rows in [1, 2, 40] {
        let x = harness.random.normals(num_rows * HEADS * COLS);
        let mut out = harness.zeros(num_rows, HEADS * OUT_COLS);
        harness.backend.map_heads(&harness.activation(&x, HEADS * COLS), &maps, &mut out).expect("maps");
        let mut expected = Vec::new();
        for (x, weight) in x.chunks_exact(COLS).zip(weights.iter().cycle()) {
            expected.extend(weight.chunks_exact(COLS).map(|row| dot(x, row)));
        }
        close("map_heads", &harness.read(&out), &expected);
    }
}

fn join_heads(harness: &mut Harness<'_>) {
    let parts = [3, 5].map(|cols| harness.random.normals(4 * 2 * cols));
    let mut out = harness.zeros(4, 2 * 8);
    let [first, second] = [(0, 6), (1, 10)].map(|(i, cols)| harness.activation(&parts[i], cols));
    harness.backend.join_heads(2, [&first, &second], &mut out).expect("joined heads");
    let heads = parts[0].chunks_exact(3).zip(parts[1].chunks_exact(5));
    let expected: Vec<f32> = heads.flat_map(|(first, second)| first.iter().chain(second).copied()).collect();
    assert_eq!(harness.read(&out), expected, "join_heads");
}

/// Compares rows of one sequence with the formula, and single rows with chunks to the bit.
fn attention(harness: &mut Harness<'_>, dtype: DType, shape: HeadShape, (first, len): (usize, usize)) {
    let HeadShape { num_heads, head_size, block_len, .. } = shape;
    let (cols, value_size) = (num_heads * head_size, head_size - first);
    let num_blocks = len.div_ceil(block_len);
    let table: Vec<u32> = (0..num_blocks as u32).rev().collect();
    let slot = |position: usize| table[position / block_len] * block_len as u32 + (position % block_len) as u32;
    let keys = harness.random.normals(len * head_size);
    let queries = harness.random.normals(len * cols);
    let scale = 1.0 / (head_size as f32).sqrt();
    let new_memory = || KvLayer {
        keys: harness.backend.zeros(dtype, num_blocks, head_size * block_len).expect("memory"),
        values: harness.backend.zeros(dtype, 0, head_size * block_len).expect("no memory"),
    };
    // Stores the keys of these positions and returns what they attend.
    let attend = |kv: &mut KvLayer, positions: std::ops::Range<usize>| {
        let rows = |values: &[f32], cols: usize| {
            harness.activation(&values[positions.start * cols..positions.end * cols], cols)
        };
        let (mut queries, mut keys) = (rows(&queries, cols), rows(&keys, head_size));
        let mut out = harness.zeros(positions.len(), num_heads * value_size);
        let attend = Attend {
            rope: None,
            values: Values::InKeys { first },
            slots: &positions.clone().map(slot).collect::<Vec<_>>(),
            positions: &positions.clone().map(|position| position as u32).collect::<Vec<_>>(),
            sequences: &[SequenceSpan { rows: 0..positions.len(), blocks: 0..num_blocks }],
            block_tables: &table,
            shape,
            scale,
            soft_cap: None,
            window: None,
            sinks: None,
        };
        harness.backend.attend(attend, &mut queries, &mut keys, kv, &mut out).expect("attention");
        harness.read(&out)
    };

    let mut kv = new_memory();
    let whole = attend(&mut kv, 0..len);
    let stored = stored(dtype, &keys);
    let row_len = num_heads * value_size;
    for position in [0, 63, 64, 511, 512, len - 1].into_iter().filter(|&position| position < len) {
        let row = &whole[position * row_len..][..row_len];
        let query = &queries[position * cols..][..cols];
        close(&format!("latents of {shape:?}"), row, &expected(dtype, query, &stored, (head_size, first), position));
    }
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let mut kv = new_memory();
    let edges = [0, 1, 63, 65, 511, 512, 513, 1030, 1031, len].map(|edge| edge.min(len));
    for (start, end) in edges.iter().zip(&edges[1..]).map(|(&start, &end)| (start, end)).filter(|(a, b)| a < b) {
        let chunk = attend(&mut kv, start..end);
        let expected = &whole[start * row_len..end * row_len];
        assert!(bits(&chunk) == bits(expected), "{dtype}, {shape:?}: rows {start}..{end} differ from the whole");
    }
}

/// Returns what a row attends by the formula, with the bound of each value.
fn expected(
    dtype: DType,
    query: &[f32],
    keys: &[f32],
    (head_size, first): (usize, usize),
    position: usize,
) -> Vec<(f64, f64)> {
    let scale = 1.0 / (head_size as f64).sqrt();
    let keys = || keys.chunks_exact(head_size).take(position + 1);
    let of_head = |query: &[f32]| {
        let weights: Vec<f64> = keys().map(|key| (dot(query, key).0 * scale).exp()).collect();
        let total: f64 = weights.iter().sum();
        // A backend may round queries and weights to the format of keys.
        let unit = match dtype {
            DType::F16 | DType::Q8_0 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 0.0,
        };
        let largest = keys().map(|key| size_of_dot(query, key)).fold(0.0, f64::max);
        let rounding = 2.0 * unit * (1.0 + scale * largest) + 64.0 * ROUNDING * (1.0 + scale * largest);
        let value = |d: usize| {
            let terms = keys().zip(&weights).map(|(key, weight)| weight / total * f64::from(key[d]));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
            (sum, (size + 0.01) * rounding)
        };
        (first..head_size).map(value).collect::<Vec<_>>()
    };
    query.chunks_exact(head_size).flat_map(of_head).collect()
}
