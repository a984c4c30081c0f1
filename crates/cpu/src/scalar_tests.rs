//! Tests that run the unsafe code of the scalar paths on tiny shapes: packing, quantizing, products, paged attention,
//! threads. They are small enough for Miri (`.ci/miri`), which cannot interpret vector instructions. Results are
//! compared between one thread and three, and between a row on its own and the same row among others.

use pellucid_tensor::{
    Attention, Backend, DType, HeadShape, HostWeight, KvLayer, Linear, SequenceSpan, StoreKv, Tensor,
};

use crate::{CpuBackend, CpuOptions, Isa};

fn backend(num_threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { num_threads, isa: Isa::Scalar }).expect("scalar code runs everywhere")
}

fn values(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + 13) % 1009) as f32 / 500.0 - 1.0).collect()
}

fn tensor(backend: &CpuBackend, values: &[f32], cols: usize) -> Tensor {
    let mut tensor = backend.zeros(DType::F32, values.len() / cols, cols).expect("memory");
    backend.write(values, &mut tensor).expect("a write");
    tensor
}

fn bits(backend: &CpuBackend, tensor: &Tensor) -> Vec<u32> {
    let mut values = vec![0.0; tensor.len()];
    backend.read(tensor, &mut values).expect("a read");
    values.into_iter().map(f32::to_bits).collect()
}

/// Two blocks of rows and two panels of columns, neither of them full.
const ROWS: usize = 17;
const COLUMNS: usize = 18;
const DEPTH: usize = 256;

fn product(backend: &CpuBackend, dtype: DType, x: &[f32]) -> Vec<u32> {
    // Bytes that are small values in every format.
    let len = dtype.bytes_for(COLUMNS * DEPTH).expect("whole blocks");
    let bytes: Vec<u8> = (0..len).map(|i| 0x28 + (i * 7 % 8) as u8).collect();
    let weight = HostWeight { dtype, rows: COLUMNS, cols: DEPTH, bytes: bytes.into() };
    let linear = Linear { weight: backend.linear_weight(weight).expect("memory"), bias: None };
    let mut out = backend.zeros(DType::F32, x.len() / DEPTH, COLUMNS).expect("memory");
    backend.linear(&tensor(backend, x, DEPTH), &linear, &mut out).expect("a product");
    bits(backend, &out)
}

#[test]
fn products_of_every_format_do_not_depend_on_threads_or_other_rows() {
    let x = values(ROWS * DEPTH);
    let (one, three) = (backend(1), backend(3));
    // Miri interprets about a thousand times as slowly: one format for each way of decoding is enough there.
    let formats = if cfg!(miri) { vec![DType::F16, DType::Q8_0, DType::Q4_K] } else { DType::ALL.to_vec() };
    for dtype in formats {
        let all = product(&three, dtype, &x);
        let last = product(&one, dtype, &x[(ROWS - 1) * DEPTH..]);
        assert_eq!(all[(ROWS - 1) * COLUMNS..], last, "{dtype}: the last row");
        if !cfg!(miri) {
            assert_eq!(all, product(&one, dtype, &x), "{dtype}: one thread and three");
        }
    }
}

/// Stores the keys and values of all positions and returns the attention of the rows at `positions`.
fn attend(backend: &CpuBackend, dtype: DType, positions: &[u32], num_positions: usize) -> Vec<u32> {
    const BLOCK_LEN: usize = 8;
    let shape = HeadShape { num_heads: 4, num_kv_heads: 2, head_size: 32, block_len: BLOCK_LEN };
    let (cols, kv_cols) = (shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size);
    // Blocks in descending order: a sequence need not be contiguous.
    let blocks: Vec<u32> = (0..num_positions.div_ceil(BLOCK_LEN) as u32).rev().collect();
    let slot = |p: usize| blocks[p / BLOCK_LEN] * BLOCK_LEN as u32 + (p % BLOCK_LEN) as u32;
    let slots: Vec<u32> = (0..num_positions).map(slot).collect();
    let memory = || backend.zeros(dtype, blocks.len(), BLOCK_LEN * kv_cols).expect("memory");
    let mut kv = KvLayer { keys: memory(), values: memory() };
    let rows = tensor(backend, &values(num_positions * kv_cols), kv_cols);
    backend.store_kv(StoreKv { keys: &rows, values: &rows, slots: &slots, shape }, &mut kv).expect("a store");
    let queries: Vec<f32> =
        positions.iter().flat_map(|&p| values(cols).into_iter().map(move |x| x + p as f32 / 64.0)).collect();
    let mut out = backend.zeros(DType::F32, positions.len(), cols).expect("memory");
    let attention = Attention {
        queries: &tensor(backend, &queries, cols),
        kv: &kv,
        positions,
        sequences: &[SequenceSpan { rows: 0..positions.len(), blocks: 0..blocks.len() }],
        block_tables: &blocks,
        shape,
        scale: 0.2,
        soft_cap: None,
        window: None,
    };
    backend.attention(attention, &mut out).expect("attention");
    bits(backend, &out)
}

#[test]
fn attention_in_every_format_does_not_depend_on_threads_or_other_rows() {
    const LEN: usize = if cfg!(miri) { 3 } else { 20 };
    let positions: Vec<u32> = (0..LEN as u32).collect();
    let (one, three) = (backend(1), backend(3));
    let formats = [DType::F16, DType::Q8_0, DType::F32, DType::BF16];
    for dtype in formats.into_iter().take(if cfg!(miri) { 2 } else { formats.len() }) {
        let all = attend(&three, dtype, &positions, LEN);
        let last = attend(&one, dtype, &positions[LEN - 1..], LEN);
        assert_eq!(all[all.len() - last.len()..], last, "{dtype}: the last row");
        assert_eq!(all, attend(&one, dtype, &positions, LEN), "{dtype}: one thread and three");
    }
}

/// More than one span of positions, so that spans are tasks of their own and their states are joined.
#[test]
fn one_row_over_several_spans_does_not_depend_on_threads() {
    let len = if cfg!(miri) { 520 } else { 1100 };
    let position = [len as u32 - 1];
    assert_eq!(attend(&backend(3), DType::F16, &position, len), attend(&backend(1), DType::F16, &position, len));
}

#[test]
fn a_residual_sum_and_norm_computed_by_the_reader_equal_separate_operations() {
    const COLS: usize = 48;
    let backend = backend(3);
    let (update, weight) = (tensor(&backend, &values(20 * COLS), COLS), tensor(&backend, &values(COLS), COLS));
    let hidden = || tensor(&backend, &values(40 * COLS)[20 * COLS..], COLS);
    let out = || backend.zeros(DType::F32, 20, COLS).expect("memory");
    let (mut joined, mut joined_out) = (hidden(), out());
    backend.add_rms_norm(&update, &mut joined, &weight, 1e-5, &mut joined_out).expect("a norm");
    let (mut apart, mut apart_out) = (hidden(), out());
    backend.add(&update, &mut apart).expect("a sum");
    backend.rms_norm(&apart, &weight, 1e-5, &mut apart_out).expect("a norm");
    assert_eq!(bits(&backend, &joined), bits(&backend, &apart));
    assert_eq!(bits(&backend, &joined_out), bits(&backend, &apart_out));
}
