//! Batch invariance, to the bit: the result of a row does not depend on the other rows of the batch.

use pellucid_tensor::{
    Activation, Attend, Attention, Backend, DType, ExpertMlp, Extension, GatedMlp, HeadShape, KvLayer, Linear, Output,
    Routing, SequenceSpan, StoreKv, Values,
};

use super::harness::Harness;
use super::random_data::RandomData;

/// Checks matrix products: each row computed alone, and in batches of 2 to 20 rows.
pub fn few_linear_rows(backend: &dyn Backend) {
    let mut harness = Harness { backend, random: RandomData(2) };
    for dtype in DType::ALL {
        let cols = if dtype.is_quantized() { 2 * dtype.block_len() } else { 90 };
        let (linear, _) = harness.linear(dtype, 21, cols);
        let x = harness.random.normals(20 * cols);
        let product = |rows: std::ops::Range<usize>| {
            let mut out = harness.zeros(rows.len(), 21);
            let x = harness.activation(&x[rows.start * cols..rows.end * cols], cols);
            harness.backend.linear(&x, &linear, &mut out).expect("linear");
            harness.read(&out).into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let alone: Vec<u32> = (0..20).flat_map(|row| product(row..row + 1)).collect();
        for count in 2..=20 {
            assert!(alone[..count * 21] == product(0..count), "{dtype}: the bits differ in a batch of {count} rows");
        }
    }
}

/// Checks matrix products with deep rows, at row counts around which backends switch kernels.
pub fn many_linear_rows(backend: &dyn Backend) {
    const OUTPUTS: usize = 200;
    let mut harness = Harness { backend, random: RandomData(4) };
    for dtype in DType::ALL {
        // Several slices for every format, and a partial last block for formats that allow one.
        let cols = if dtype.is_quantized() { 9 * 256 } else { 2310 };
        let (linear, _) = harness.linear(dtype, OUTPUTS, cols);
        let x = harness.random.normals(150 * cols);
        let product = |rows: std::ops::Range<usize>| {
            let mut out = harness.zeros(rows.len(), OUTPUTS);
            let x = harness.activation(&x[rows.start * cols..rows.end * cols], cols);
            harness.backend.linear(&x, &linear, &mut out).expect("linear");
            harness.read(&out).into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let all = product(0..150);
        for rows in [0..1, 149..150, 3..5, 10..18, 10..19, 0..16, 16..33, 0..33, 64..128, 70..135] {
            let expected = &all[rows.start * OUTPUTS..rows.end * OUTPUTS];
            assert!(product(rows.clone()) == expected, "{dtype}: rows {rows:?} differ from those of 150 rows");
        }
    }
}

/// Checks experts in every format, at row counts around which backends switch kernels, with several slices of the
/// columns and partial output tiles.
pub fn expert_rows(backend: &dyn Backend) {
    const ROWS: usize = 530;
    const NUM_EXPERTS: usize = 6;
    let mut harness = Harness { backend, random: RandomData(5) };
    for (i, dtype) in DType::ALL.into_iter().enumerate() {
        // Files mix formats: the down projection has another format than gate and up.
        let last = DType::ALL[(i + 1) % DType::ALL.len()];
        let (hidden, width) = (2304, if last.is_quantized() { 256 } else { 200 });
        let biased = |harness: &mut Harness<'_>, mut linear: Linear| {
            if i % 3 == 1 {
                let bias = harness.random.normals(linear.weight.rows());
                linear.bias = Some(harness.vector(&bias));
            }
            linear
        };
        let experts: Vec<GatedMlp> = (0..NUM_EXPERTS)
            .map(|_| {
                let [gate, up] = [0, 1].map(|_| harness.linear(dtype, width, hidden).0);
                let down = harness.linear(last, hidden, width).0;
                let [gate, up, down] = [gate, up, down].map(|linear| biased(&mut harness, linear));
                GatedMlp { gate, up, down }
            })
            .collect();
        let (x, logits) = (harness.random.normals(ROWS * hidden), harness.random.normals(ROWS * NUM_EXPERTS));
        let has_clamp = i % 2 == 1 && backend.supports(Extension::ClampedSwiglu);
        let activation = if has_clamp { Activation::ClampedSwiglu } else { Activation::Silu };
        let mlp = |rows: std::ops::Range<usize>| {
            let mut out = harness.zeros(rows.len(), hidden);
            let part =
                |values: &[f32], cols: usize| harness.activation(&values[rows.start * cols..rows.end * cols], cols);
            let mlp = ExpertMlp {
                x: &part(&x, hidden),
                router_logits: &part(&logits, NUM_EXPERTS),
                routing: Routing::softmax(3, true),
                score_bias: None,
                expert_scales: None,
                experts: &experts,
                activation,
            };
            harness.backend.expert_mlp(mlp, Output::Rows(&mut out)).expect("experts");
            harness.read(&out).into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let all = mlp(0..ROWS);
        for rows in [0..1, 529..530, 3..5, 10..18, 10..27, 64..128, 3..515] {
            let expected = &all[rows.start * hidden..rows.end * hidden];
            assert!(mlp(rows.clone()) == expected, "{dtype}, {last}: rows {rows:?} differ from those of {ROWS} rows");
        }
    }
}

/// Head sizes, window and block length of a case, and its format of keys and values.
#[derive(Debug, Clone, Copy)]
struct AttentionShape {
    dtype: DType,
    head_size: usize,
    num_heads: usize,
    window: Option<usize>,
    block_len: usize,
    has_sinks: bool,
}

/// Checks attention: a row has the same bits alone and in a chunk, over several spans of positions, with windows, in
/// every format. The content of slots that were never written must not matter.
pub fn attention_rows(backend: &dyn Backend) {
    let mut harness = Harness { backend, random: RandomData(3) };
    for (dtype, head_size, num_heads, window, block_len) in [
        (DType::F32, 10, 3, None, 12),
        (DType::F16, 32, 4, None, 32),
        (DType::BF16, 20, 1, Some(530), 16),
        (DType::F16, 80, 2, None, 32),
        (DType::BF16, 96, 3, Some(200), 16),
        (DType::F16, 128, 4, None, 32),
        (DType::BF16, 64, 7, Some(300), 8),
        (DType::Q8_0, 64, 2, Some(70), 32),
        (DType::Q8_0, 128, 4, None, 32),
        (DType::BF16, 256, 4, Some(400), 32),
        (DType::Q8_0, 256, 2, None, 32),
    ] {
        let chunks = &[(0, ROW_POSITIONS), (500, 530), (1000, 1003), (61, 700), (508, 514), (1020, 1036), (62, 64)];
        let case = AttentionShape { dtype, head_size, num_heads, window, block_len, has_sinks: false };
        attention_case(&mut harness, case, chunks);
    }
}

/// Checks attention with a sink for each head as [`attention_rows`] does.
pub fn attention_rows_with_sinks(backend: &dyn Backend) {
    if !backend.supports(Extension::AttentionSinks) {
        return;
    }
    let mut harness = Harness { backend, random: RandomData(11) };
    for (dtype, head_size, num_heads, window, block_len) in [
        (DType::F32, 10, 3, None, 12),
        (DType::F16, 64, 8, None, 32),
        (DType::BF16, 128, 7, Some(300), 8),
        (DType::F16, 80, 2, None, 32),
        (DType::Q8_0, 64, 8, Some(128), 32),
        (DType::Q8_0, 256, 2, None, 32),
    ] {
        let case = AttentionShape { dtype, head_size, num_heads, window, block_len, has_sinks: true };
        attention_case(&mut harness, case, &[(0, 200), (1000, 1003), (61, 700), (508, 514)]);
    }
}

/// Checks attention of single rows with 32 heads: too many for a device to hold the partial results of all rows at
/// once.
pub fn attention_rows_of_many_heads(backend: &dyn Backend) {
    let mut harness = Harness { backend, random: RandomData(9) };
    for (dtype, head_size) in
        [(DType::F16, 128), (DType::Q8_0, 128), (DType::F16, 96), (DType::F32, 128), (DType::F16, 512)]
    {
        attention_case(
            &mut harness,
            AttentionShape { dtype, head_size, num_heads: 32, window: None, block_len: 32, has_sinks: false },
            &[],
        );
    }
}

/// Length of the sequence in each case.
const ROW_POSITIONS: usize = 1100;

/// Compares rows computed alone with the same rows in chunks of these positions, and in batches with other sequences.
fn attention_case(harness: &mut Harness<'_>, case: AttentionShape, chunks: &[(usize, usize)]) {
    const LEN: usize = ROW_POSITIONS;
    let AttentionShape { dtype, head_size, num_heads, window, block_len, has_sinks } = case;
    if !harness.has_kv(dtype) {
        return;
    }
    let shape = HeadShape { num_heads, num_kv_heads: 1, head_size, block_len };
    let num_blocks = LEN.div_ceil(block_len);
    let table: Vec<u32> = (0..num_blocks as u32).map(|block| (block * 7) % num_blocks as u32).collect();
    let tables: Vec<u32> = if num_blocks.is_multiple_of(7) { (0..num_blocks as u32).rev().collect() } else { table };
    // The second half is for what `attend` stores: no sequence reads it.
    let blocks = || harness.backend.zeros(dtype, 2 * num_blocks, head_size * block_len).expect("memory");
    let mut kv = KvLayer { keys: blocks(), values: blocks() };
    let slots: Vec<u32> = (0..LEN)
        .map(|position| tables[position / block_len] * block_len as u32 + (position % block_len) as u32)
        .collect();
    let keys = harness.random.normals(LEN * head_size);
    let values = harness.random.normals(LEN * head_size);
    let queries = harness.random.normals(LEN * num_heads * head_size);
    let cols = num_heads * head_size;
    let sinks = harness.random.normals(num_heads);
    let sinks = harness.vector(&sinks);
    // Attends from `positions`, each as a sequence of its own or all as one chunk.
    let attend = |kv: &mut KvLayer, positions: &[usize], one_by_one: bool| {
        let rows: Vec<f32> = positions.iter().flat_map(|row| &queries[row * cols..][..cols]).copied().collect();
        let mut out = harness.zeros(positions.len(), cols);
        // With many rows, the block table does not start at entry 0.
        let entries = tables.repeat(if positions.len() > 30 { 2 } else { 1 });
        let blocks = entries.len() - tables.len()..entries.len();
        let sequences = match one_by_one {
            true => {
                (0..positions.len()).map(|row| SequenceSpan { rows: row..row + 1, blocks: blocks.clone() }).collect()
            }
            false => vec![SequenceSpan { rows: 0..positions.len(), blocks }],
        };
        let mut queries = harness.activation(&rows, cols);
        let positions = &positions.iter().map(|&position| position as u32).collect::<Vec<_>>()[..];
        let (sequences, block_tables, scale, soft_cap) = (&sequences[..], &entries[..], 0.2, None);
        if has_sinks {
            let slots: Vec<u32> = (0..positions.len()).map(|row| (num_blocks * block_len + row) as u32).collect();
            let [mut keys, values] = [(); 2].map(|()| harness.zeros(positions.len(), head_size));
            let attend = Attend {
                rope: None,
                values: Values::Rows(&values),
                slots: &slots,
                positions,
                sequences,
                block_tables,
                shape,
                scale,
                soft_cap,
                window,
                sinks: Some(&sinks),
            };
            harness.backend.attend(attend, &mut queries, &mut keys, kv, &mut out).expect("attention");
        } else {
            let queries = &queries;
            let attention =
                Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window };
            harness.backend.attention(attention, &mut out).expect("attention");
        }
        harness.read(&out).into_iter().map(f32::to_bits).collect::<Vec<u32>>()
    };
    let store = |kv: &mut KvLayer, from: usize, keys: &[f32], values: &[f32]| {
        let slots = &slots[from..from + keys.len() / head_size];
        let (keys, values) = (harness.activation(keys, head_size), harness.activation(values, head_size));
        let store = StoreKv { keys: &keys, values: &values, slots, shape };
        harness.backend.store_kv(store, kv).expect("store");
    };
    // First token by token: every later slot holds NaN.
    store(&mut kv, 0, &vec![f32::NAN; LEN * head_size], &vec![f32::NAN; LEN * head_size]);
    let mut alone = Vec::new();
    let mut known = 0;
    for position in (0..LEN).filter(|p| p % 61 == 0 || [62, 63, 64, 510, 511, 512, 513, 1023, 1024].contains(p)) {
        let new = known * head_size..(position + 1) * head_size;
        store(&mut kv, known, &keys[new.clone()], &values[new]);
        known = position + 1;
        alone.push((position, attend(&mut kv, &[position], true)));
    }
    store(&mut kv, 0, &keys, &values);
    for &(start, end) in chunks {
        let together = attend(&mut kv, &(start..end).collect::<Vec<_>>(), false);
        for (position, alone) in alone.iter().filter(|(position, _)| (start..end).contains(position)) {
            let row = position - start;
            assert!(together[row * cols..][..cols] == *alone, "{dtype}: row {position} in {start}..{end} differs");
        }
    }
    // Batches with other sequences: a few short ones, a few long ones, all, and 450, most of them short.
    let many = (0..450).map(|i| if i % 16 == 15 { &alone[alone.len() - 1 - i / 16 % 8] } else { &alone[i % 9] });
    for batch in
        [alone[..5].iter().collect(), alone[15..18].iter().collect(), alone.iter().collect(), many.collect::<Vec<_>>()]
    {
        let positions: Vec<usize> = batch.iter().map(|(position, _)| *position).collect();
        let together = attend(&mut kv, &positions, true);
        for (row, (position, alone)) in batch.into_iter().enumerate() {
            let found = &together[row * cols..][..cols];
            assert!(found == alone, "{dtype}: position {position} differs in a batch of {} sequences", positions.len());
        }
    }
}
