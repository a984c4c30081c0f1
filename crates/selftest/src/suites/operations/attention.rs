//! Attention over paged keys and values: head sizes, formats of KV memory, windows and soft caps.

use pellucid_model::KvMemory;
use pellucid_tensor::{Attend, Attention, DType, Extension, HeadShape, KvLayer, SequenceSpan, StoreKv, Values, quant};

use crate::suites::harness::Harness;
use crate::suites::tolerance::{ROUNDING, close, dot, size_of_dot};

/// A format of keys and values, head sizes, and options of attention.
#[derive(Debug, Clone, Copy)]
struct AttentionCase {
    dtype: DType,
    shape: HeadShape,
    window: Option<usize>,
    soft_cap: Option<f32>,
    has_sinks: bool,
}

pub(super) fn attention(harness: &mut Harness<'_>) {
    let sizes = [(4, 2, 64), (3, 1, 80), (2, 2, 96), (8, 2, 128), (4, 4, 256), (6, 2, 512), (3, 3, 5)];
    for (num_heads, num_kv_heads, head_size) in sizes {
        for dtype in KvMemory::FORMATS.into_iter().filter(|dtype| dtype.bytes_for(head_size).is_some()) {
            if !harness.has_kv(dtype) {
                continue;
            }
            let shape = HeadShape { num_heads, num_kv_heads, head_size, block_len: 8 };
            let plain = AttentionCase { dtype, shape, window: None, soft_cap: None, has_sinks: false };
            attend_case(harness, &plain);
            attend_case(harness, &AttentionCase { window: Some(11), ..plain });
            attend_case(harness, &AttentionCase { window: Some(1), soft_cap: Some(2.0), ..plain });
            attend_case(harness, &AttentionCase { shape: HeadShape { block_len: 32, ..shape }, ..plain });
            if harness.backend.supports(Extension::AttentionSinks) {
                attend_case(harness, &AttentionCase { has_sinks: true, ..plain });
                attend_case(harness, &AttentionCase { has_sinks: true, window: Some(11), ..plain });
            }
            if matches!(dtype, DType::F16 | DType::Q8_0) {
                overflow(harness, dtype, head_size);
            }
        }
    }
}

/// A key beyond the range of its format must make the result NaN: it must not get weight zero and go unnoticed.
fn overflow(harness: &mut Harness<'_>, dtype: DType, head_size: usize) {
    const LEN: usize = 40;
    let shape = HeadShape { num_heads: 2, num_kv_heads: 1, head_size, block_len: 32 };
    let blocks = || harness.backend.zeros(dtype, 2, head_size * shape.block_len).expect("memory");
    let mut kv = KvLayer { keys: blocks(), values: blocks() };
    let mut keys = vec![0.5; LEN * head_size];
    keys[3 * head_size] = -3e38;
    let (keys, values) =
        (harness.activation(&keys, head_size), harness.activation(&vec![0.25; LEN * head_size], head_size));
    let slots: Vec<u32> = (0..LEN as u32).collect();
    harness.backend.store_kv(StoreKv { keys: &keys, values: &values, slots: &slots, shape }, &mut kv).expect("store");
    // A single row, and a chunk.
    for positions in [vec![39], (30..40).collect()] {
        let cols = shape.num_heads * head_size;
        let mut out = harness.zeros(positions.len(), cols);
        let attention = Attention {
            queries: &harness.activation(&vec![1.0; positions.len() * cols], cols),
            kv: &kv,
            positions: &positions,
            sequences: &[SequenceSpan { rows: 0..positions.len(), blocks: 0..2 }],
            block_tables: &[0, 1],
            shape,
            scale: 1.0,
            soft_cap: None,
            window: None,
        };
        harness.backend.attention(attention, &mut out).expect("attention");
        assert!(
            harness.read(&out).iter().all(|x| x.is_nan()),
            "{dtype}, heads of {head_size}: a key beyond the format's range goes unnoticed"
        );
    }
}

/// Returns values as they are after encoding and decoding.
pub(super) fn stored(dtype: DType, values: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0; dtype.bytes_for(values.len()).expect("heads are whole blocks")];
    quant::encode(dtype, values, &mut bytes);
    let mut decoded = vec![0.0; values.len()];
    quant::decode(dtype, &bytes, &mut decoded);
    decoded
}

/// Checks two sequences in scattered blocks: one computes its last 3 positions, the other all of its 37 in one chunk.
fn attend_case(harness: &mut Harness<'_>, case: &AttentionCase) {
    let AttentionCase { dtype, shape, window, soft_cap, has_sinks } = *case;
    let HeadShape { num_heads, num_kv_heads, head_size, block_len } = shape;
    let tables: [Vec<u32>; 2] = [vec![9, 2, 7, 4, 11, 0], vec![3, 10, 1, 8, 5]];
    let lens = [43usize, 37];
    let chunk_starts = [40usize, 0];
    let (kv_cols, cols) = (num_kv_heads * head_size, num_heads * head_size);
    let keys = lens.map(|len| harness.random.normals(len * kv_cols));
    let values = lens.map(|len| harness.random.normals(len * kv_cols));

    let blocks = || harness.backend.zeros(dtype, 12 + 5, kv_cols * block_len).expect("memory");
    let mut kv = KvLayer { keys: blocks(), values: blocks() };
    for sequence in 0..2 {
        let slots: Vec<u32> = (0..lens[sequence])
            .map(|position| tables[sequence][position / block_len] * block_len as u32 + (position % block_len) as u32)
            .collect();
        let (keys, values) =
            (harness.activation(&keys[sequence], kv_cols), harness.activation(&values[sequence], kv_cols));
        harness
            .backend
            .store_kv(StoreKv { keys: &keys, values: &values, slots: &slots, shape }, &mut kv)
            .expect("store");
    }

    // The formula uses the stored values, so the rounding of keys and values does not count as an error.
    let keys = keys.map(|keys| stored(dtype, &keys));
    let values = values.map(|values| stored(dtype, &values));
    let rows: Vec<(usize, usize)> = (0..2).flat_map(|s| (chunk_starts[s]..lens[s]).map(move |p| (s, p))).collect();
    let queries = harness.random.normals(rows.len() * cols);
    let scale = 1.0 / (head_size as f32).sqrt();
    let first = lens[0] - chunk_starts[0];
    let positions = rows.iter().map(|row| row.1 as u32).collect::<Vec<_>>();
    let sequences = [
        SequenceSpan { rows: 0..first, blocks: 0..tables[0].len() },
        SequenceSpan { rows: first..rows.len(), blocks: tables[0].len()..tables[0].len() + tables[1].len() },
    ];
    let (positions, sequences, block_tables) = (&positions[..], &sequences[..], &tables.concat()[..]);
    let mut query_rows = harness.activation(&queries, cols);
    let mut out = harness.zeros(rows.len(), cols);
    let sinks = if has_sinks { harness.random.normals(num_heads) } else { Vec::new() };
    if has_sinks {
        // `attend` stores into blocks that no sequence has.
        let slots: Vec<u32> = (0..rows.len()).map(|row| (12 * block_len + row) as u32).collect();
        let mut keys = harness.zeros(rows.len(), kv_cols);
        let (values, sinks) = (&harness.zeros(rows.len(), kv_cols), &harness.vector(&sinks));
        let attend = Attend {
            rope: None,
            values: Values::Rows(values),
            slots: &slots,
            positions,
            sequences,
            block_tables,
            shape,
            scale,
            soft_cap,
            window,
            sinks: Some(sinks),
        };
        harness.backend.attend(attend, &mut query_rows, &mut keys, &mut kv, &mut out).expect("attention");
    } else {
        let queries = &query_rows;
        let kv = &kv;
        let attention = Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window };
        harness.backend.attention(attention, &mut out).expect("attention");
    }

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
            let total = weights.iter().sum::<f64>() + sinks.get(head).map_or(0.0, |&sink| f64::from(sink).exp());
            // With 16-bit keys and values, a backend may round queries and weights to the same format. A score then
            // moves by `unit` times the size of its terms, its weight by the same factor and one more rounding, and so
            // does the sum of the weights. Values stored in 8 bits may be multiplied in f16.
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
                // Scores of order one and their exponentials are off by a few roundings.
                expected.push((sum, (size + 0.01) * 64.0 * ROUNDING + size * kept_rounding));
            }
        }
    }
    close(&format!("attention {case:?}"), &harness.read(&out), &expected);
}
