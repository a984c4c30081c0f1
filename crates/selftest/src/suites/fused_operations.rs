//! Fused operations, to the bit: they equal their parts, run one after the other.

use pellucid_tensor::{
    Activation, Attend, Attention, Backend, DType, Extension, HeadShape, Input, KvLayer, Linear, Pending, Residual,
    Rope, RopeStyle, SequenceSpan, StoreKv, Tensor, Values,
};

use super::harness::Harness;
use super::random_data::RandomData;

/// Checks that a gated product equals two products and a gate: in every format and in two different ones, with and
/// without bias, for few rows, many rows, and more rows than caches hold.
pub fn gated_equals_its_parts(backend: &dyn Backend) {
    const COLS: usize = 256;
    const MANY_ROWS: usize = 600;
    let mut harness = Harness { backend, random: RandomData(6) };
    let x = harness.random.normals(MANY_ROWS * COLS);
    let pairs = DType::ALL.map(|dtype| (dtype, dtype)).into_iter().chain([(DType::Q4_K, DType::Q6_K)]);
    for (i, (first, second)) in pairs.enumerate() {
        let is_large = first == second && matches!(first, DType::Q4_0 | DType::Q8_0 | DType::Q4_K | DType::BF16);
        // Not always a whole number of panels.
        let (num_columns, max_rows) = if is_large { (448, MANY_ROWS) } else { ([96, 88][i % 2], 37) };
        let maps = [first, second].map(|dtype| {
            let bias = (i % 4 == 3).then(|| harness.random.normals(num_columns));
            let bias = bias.map(|values| harness.activation(&values, num_columns));
            Linear { bias, ..harness.linear(dtype, num_columns, COLS).0 }
        });
        for num_rows in [1, 2, 7, 16, 17, max_rows] {
            let x = harness.activation(&x[..num_rows * COLS], COLS);
            let activations = [Activation::Silu, rarer_activation(backend, i)];
            for activation in activations.into_iter().take(if num_rows == MANY_ROWS { 1 } else { 2 }) {
                let mut out = [(); 4].map(|()| harness.zeros(num_rows, num_columns));
                let [gated, spare, gate, up] = &mut out;
                backend
                    .gated(Input::Rows(&x), [(&maps[0], gated), (&maps[1], spare)], activation)
                    .expect("a gated product");
                backend.linears(Input::Rows(&x), &mut [(&maps[0], gate), (&maps[1], up)]).expect("products");
                backend.gate(activation, up, gate).expect("a gate");
                let [gated, _, gate, _] = out.each_ref().map(|out| harness.read(out));
                let same = gated.iter().zip(&gate).all(|(x, y)| x.to_bits() == y.to_bits());
                assert!(same, "{first} and {second}: {num_rows} rows, {activation:?}");
            }
        }
    }
}

/// An activation that most models do not have, each in turn.
fn rarer_activation(backend: &dyn Backend, i: usize) -> Activation {
    let is_clamped = i % 2 == 1 && backend.supports(Extension::ClampedSwiglu);
    if is_clamped { Activation::ClampedSwiglu } else { Activation::GeluTanh }
}

/// Checks that products of a joined input equal an addition to the residual stream, a norm and products. The residual
/// stream afterwards must be equal too.
pub fn joined_input_equals_its_parts(backend: &dyn Backend) {
    const COLS: usize = 256;
    let mut harness = Harness { backend, random: RandomData(7) };
    let weight = harness.random.normals(COLS);
    let weight = harness.activation(&weight, COLS);
    // The last two pairs need the input in two formats.
    let alike = [DType::F32, DType::BF16, DType::Q4_1, DType::Q8_0, DType::Q5_K, DType::Q3_K].map(|dtype| [dtype; 2]);
    for dtypes in alike.into_iter().chain([[DType::Q4_0, DType::Q6_K], [DType::BF16, DType::F32]]) {
        let maps = dtypes.map(|dtype| harness.linear(dtype, 80, COLS).0);
        for num_rows in [1, 3, 16, 130] {
            let values = [(); 2].map(|()| harness.random.normals(num_rows * COLS));
            for is_gated in [false, true] {
                let found = [false, true].map(|is_fused| {
                    let [update, hidden] = values.each_ref().map(|values| harness.activation(values, COLS));
                    let mut residual = Residual { hidden, update, pending: Pending::Update };
                    let mut normed = harness.zeros(num_rows, COLS);
                    let mut out = [(); 2].map(|()| harness.zeros(num_rows, 80));
                    let [first, second] = &mut out;
                    let input = if is_fused {
                        let (residual, normed) = (&mut residual, &mut normed);
                        Input::Joined { residual, weight: &weight, eps: 1e-5, normed }
                    } else {
                        let Residual { hidden, update, .. } = &mut residual;
                        backend
                            .add_rms_norm(update, hidden, &weight, 1e-5, &mut normed)
                            .expect("an addition and a norm");
                        Input::Rows(&normed)
                    };
                    if is_gated {
                        let maps = [(&maps[0], first), (&maps[1], second)];
                        backend.gated(input, maps, Activation::Silu).expect("a gated product");
                    } else {
                        backend.linears(input, &mut [(&maps[0], first), (&maps[1], second)]).expect("products");
                    }
                    let read = |x: &Tensor| harness.read(x).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    [&out[0], &out[usize::from(!is_gated)], &residual.hidden, &normed].map(read)
                });
                assert!(found[0] == found[1], "{dtypes:?}: {num_rows} rows, gated: {is_gated}");
            }
        }
    }
}

/// A sequence of a step: the number of positions before it, and the number of rows.
type Part = (usize, usize);

/// Steps: one token, short and over several spans; many tokens; prompts beside tokens; a few rows of one sequence, as
/// in speculative decoding.
const STEPS: [&[Part]; 7] = [
    &[(0, 1)],
    &[(1100, 1)],
    &[(510, 4)],
    &[(40, 1), (7, 1), (31, 1), (32, 1), (511, 1), (512, 1), (90, 1), (0, 1), (64, 1)],
    &[(20, 1), (0, 70), (700, 1), (33, 3)],
    &[(500, 40)],
    &[(0, 150), (130, 2)],
];

/// Checks that fused attention equals rotating, storing and attending. One more token afterwards reads the stored keys
/// and values.
pub fn attend_equals_its_parts(backend: &dyn Backend) {
    let mut harness = Harness { backend, random: RandomData(5) };
    for (dtype, num_kv_heads, group, head_size, block_len, style, window) in [
        (DType::F16, 3, 3, 64, 32, Some(RopeStyle::Half), None),
        (DType::BF16, 2, 4, 32, 64, Some(RopeStyle::Interleaved), Some(300)),
        (DType::F16, 2, 2, 64, 96, None, None),
        (DType::Q8_0, 1, 6, 128, 32, Some(RopeStyle::Interleaved), None),
        (DType::F32, 2, 1, 20, 12, Some(RopeStyle::Half), Some(40)),
    ] {
        if !harness.has_kv(dtype) {
            continue;
        }
        let shape = HeadShape { num_heads: num_kv_heads * group, num_kv_heads, head_size, block_len };
        for parts in STEPS {
            Case { dtype, shape, style, window, parts }.check(&mut harness);
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    shape: HeadShape,
    style: Option<RopeStyle>,
    window: Option<usize>,
    parts: &'static [Part],
}

impl Case {
    fn check(&self, harness: &mut Harness<'_>) {
        let HeadShape { num_heads, num_kv_heads, head_size, block_len } = self.shape;
        let blocks_of = |&(before, rows): &Part| (before + rows + 1).div_ceil(block_len);
        let num_blocks: usize = self.parts.iter().map(blocks_of).sum();
        // Every second block from the end, then the others: blocks that are adjacent in a table are not adjacent in
        // memory.
        let (odd, even): (Vec<u32>, Vec<u32>) = (0..num_blocks as u32).rev().partition(|block| block % 2 == 1);
        let tables = [odd, even].concat();
        let memory = |harness: &Harness<'_>| {
            let blocks =
                || harness.backend.zeros(self.dtype, num_blocks, num_kv_heads * head_size * block_len).expect("memory");
            KvLayer { keys: blocks(), values: blocks() }
        };
        let mut kv = [memory(harness), memory(harness)];
        let earlier: Vec<Part> = self.parts.iter().map(|&(before, _)| (0, before)).collect();
        let later: Vec<Part> = self.parts.iter().map(|&(before, rows)| (before + rows, 1)).collect();
        for (number, step) in [&earlier[..], self.parts, &later[..]].into_iter().enumerate() {
            let rows = StepRows::new(self, step, &tables);
            if rows.positions.is_empty() {
                continue;
            }
            let inputs = [num_heads, num_kv_heads, num_kv_heads]
                .map(|heads| harness.random.normals(rows.positions.len() * heads * head_size));
            let found = [true, false]
                .map(|is_fused| rows.attend(self, harness, is_fused, &inputs, &mut kv[usize::from(is_fused)]));
            assert!(found[0] == found[1], "{self:?}: step {number} differs");
        }
    }
}

/// The rows of one step, as arguments of a backend.
struct StepRows<'a> {
    positions: Vec<u32>,
    slots: Vec<u32>,
    sequences: Vec<SequenceSpan>,
    tables: &'a [u32],
}

impl<'a> StepRows<'a> {
    /// Builds the rows of `parts`, the sequences as far as this step computes them; the block tables are those of the
    /// whole case.
    fn new(case: &Case, parts: &[Part], tables: &'a [u32]) -> Self {
        let block_len = case.shape.block_len;
        let mut rows = StepRows { positions: Vec::new(), slots: Vec::new(), sequences: Vec::new(), tables };
        let mut first_block = 0;
        for (&(before, count), &(all_before, all_count)) in parts.iter().zip(case.parts) {
            let num_blocks = (all_before + all_count + 1).div_ceil(block_len);
            let blocks = first_block..first_block + num_blocks;
            first_block = blocks.end;
            let start = rows.positions.len();
            for position in before..before + count {
                let block = tables[blocks.start + position / block_len];
                rows.positions.push(position as u32);
                rows.slots.push(block * block_len as u32 + (position % block_len) as u32);
            }
            if count > 0 {
                rows.sequences.push(SequenceSpan { rows: start..start + count, blocks });
            }
        }
        rows
    }

    /// Returns the bits of attention, fused or as separate operations.
    fn attend(
        &self,
        case: &Case,
        harness: &Harness<'_>,
        is_fused: bool,
        inputs: &[Vec<f32>; 3],
        kv: &mut KvLayer,
    ) -> Vec<u32> {
        let StepRows { positions, slots, sequences, tables: block_tables } = self;
        let &Case { shape, window, style, .. } = case;
        let [mut queries, mut keys, values] =
            inputs.each_ref().map(|values| harness.activation(values, values.len() / positions.len()));
        let mut out = harness.zeros(positions.len(), queries.cols());
        // RoPE rotates a part of each head.
        let frequencies: Vec<f32> = (0..shape.head_size / 2 - 2).map(|i| 0.8f32.powi(i as i32)).collect();
        let mut angles = harness.zeros(positions.len(), 2 * frequencies.len());
        harness.backend.rope_angles(positions, &frequencies, 1.0, &mut angles).expect("angles");
        let rope = style.map(|style| Rope { angles: &angles, head_size: shape.head_size, style });
        let (scale, soft_cap) = (0.2, window.map(|_| 30.0));
        if is_fused {
            let attend = Attend {
                rope,
                values: Values::Rows(&values),
                slots,
                positions,
                sequences,
                block_tables,
                shape,
                scale,
                soft_cap,
                window,
                sinks: None,
            };
            harness.backend.attend(attend, &mut queries, &mut keys, kv, &mut out).expect("fused attention");
        } else {
            if let Some(rope) = rope {
                harness.backend.rope(rope, &mut queries).expect("rope");
                harness.backend.rope(rope, &mut keys).expect("rope");
            }
            harness.backend.store_kv(StoreKv { keys: &keys, values: &values, slots, shape }, kv).expect("store");
            let queries = &queries;
            let attention =
                Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window };
            harness.backend.attention(attention, &mut out).expect("attention");
        }
        harness.read(&out).into_iter().map(f32::to_bits).collect()
    }
}
