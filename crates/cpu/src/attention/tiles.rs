//! Attention by the tiles of AMX: scores and weighted sums as products of bf16 matrices, for one row as for many.
//!
//! `scores[q][j] = q·k_j` and `sums[q] += weights[q][j] v_j` in blocks of sixteen queries. A tile multiplies bf16, which is too coarse for
//! these numbers, so each is two of them, x = high + low: keys and values in f16 exactly so (11 bits in 8 + 8), queries and weights to
//! 2^-16 of themselves. A product is then `high·low + high·high + low·high`, in this order, 32 numbers at a time.
//!
//! The law of [`super`] holds because the machine computes each row of a tile by itself, in an order that the instruction fixes, and a
//! weight of zero adds nothing: how many rows a tile has, and what the others see, plays no part. The order of numbers within 32 is that
//! of the layout (see [`super::pages`]).
//!
//! Bound: 24 multiplications of 16 cycles for 16 queries and 32 positions of a head of 64, beside 32 vectors of exponentials.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use pellucid_tensor::DType;

use super::SPAN;
use super::kernel::Softmax;
use super::lanes::Lanes;
use super::pages::STEP;
use super::span::{Queries, SCORES_STRIDE, Workspace};
use super::state::State;
use super::tile::Pages;
use crate::memory::Buffer;
use crate::simd::amx::{TileConfig, release_tiles};

/// Queries of a tile.
const ROWS: usize = 16;
const LINE: usize = 64;
/// Positions whose keys are split at a time: four tiles of scores.
const KEYS: usize = 64;
/// Bytes from a query's scores to the next one's.
const SCORES_BYTES: usize = SCORES_STRIDE * size_of::<f32>();
/// The upper half of an f32, which is a bf16.
const HIGH: i32 = 0xffff_0000_u32 as i32;

/// What a thread keeps from task to task.
#[derive(Debug, Default)]
pub(super) struct Planes {
    /// `[tile][step][high, low][16 queries][32 numbers]`
    queries: Buffer<u16>,
    /// High parts of some positions' keys or values, then low parts.
    memory: Buffer<u16>,
}

/// Positions of a span whose values are no numbers, bit by bit.
type Marks = [u32; SPAN / STEP];

impl Queries<'_> {
    /// The state that a span leaves for each query, as [`Queries::span`] but by tiles.
    ///
    /// # Safety
    /// The layout is for tiles.
    #[inline(always)]
    pub(super) unsafe fn span_by_tiles<L: Lanes>(
        &self,
        lanes: L,
        span: usize,
        workspace: &mut Workspace,
        state: &mut State<'_>,
    ) {
        let Workspace { scores, planes, .. } = workspace;
        let scores = scores.room_for(self.len() * SCORES_STRIDE);
        // SAFETY: passed on from the caller; `scores` and `state` have a row for every query.
        unsafe {
            self.split_queries(planes);
            let mut tiles = Tiles { queries: self, span, configured: 0 };
            tiles.scores(planes, scores);
            for tile in 0..tiles.count() {
                let blocks = tiles.blocks(tile, 0..SPAN);
                for i in tiles.queries_of(tile) {
                    let scores = &mut scores[i * SCORES_STRIDE..][..SPAN];
                    (state.largest[i], state.sums[i]) =
                        weights(lanes, self.softmax(), scores, self.visible(i, span), blocks.clone());
                }
            }
            tiles.values(planes, scores, state, false);
            // A weight of zero does not silence a value that is no number, seen or not: these rows may have seen none.
            if state.values.iter().any(|value| value.is_nan()) {
                let marks = tiles.values(planes, scores, state, true);
                for i in (0..self.len()).filter(|&i| sees_mark(&marks, self.visible(i, span))) {
                    state.sums[i] = f32::NAN;
                }
            }
            release_tiles();
        }
    }

    fn head_size(&self) -> usize {
        self.pages().layout.shape.head_size
    }

    /// The keys of 32 positions.
    fn keys(&self, position: usize) -> Lines {
        let Pages { layout, keys, .. } = *self.pages();
        let groups = layout.shape.block_len / ROWS;
        self.lines(keys, position, position % layout.shape.block_len / ROWS * LINE, groups * LINE)
    }

    /// The values of 32 positions.
    fn values(&self, position: usize) -> Lines {
        let Pages { layout, values, .. } = *self.pages();
        let first = position % layout.shape.block_len / STEP * layout.shape.head_size * LINE;
        self.lines(values, position, first, 2 * LINE)
    }

    /// Lines of the block that holds a position, `first` bytes from its region's start.
    fn lines(&self, bytes: &[u8], position: usize, first: usize, stride: usize) -> Lines {
        let (region, next) = self.pages().region(bytes, position);
        let rows = self.head_size() / 2;
        assert!(first + (rows - 1) * stride + 2 * LINE <= region.len());
        let ahead = next.map_or(0, |next| (next.as_ptr() as isize).wrapping_sub(region.as_ptr() as isize));
        Lines { start: region[first..].as_ptr(), rows, stride, dtype: self.pages().layout.dtype, ahead }
    }

    /// Queries as tiles, what is missing of the last filled with zeros.
    ///
    /// # Safety
    /// The machine has AVX-512.
    unsafe fn split_queries(&self, planes: &mut Planes) {
        let head_size = self.head_size();
        let steps = head_size / STEP;
        let out = planes.queries.grow(self.len().next_multiple_of(ROWS) * 2 * head_size);
        for i in 0..self.len() {
            for step in 0..steps {
                let numbers = self.query(i)[step * STEP..].as_ptr();
                let at = ((i / ROWS * steps + step) * 2 * ROWS + i % ROWS) * STEP;
                // SAFETY: 32 numbers of the query; a row of two tiles.
                unsafe { split(numbers, out[at..].as_mut_ptr(), out[at + ROWS * STEP..].as_mut_ptr()) };
            }
        }
    }
}

/// Whether one of the visible positions is marked.
fn sees_mark(marks: &Marks, visible: Range<usize>) -> bool {
    visible.into_iter().any(|position| marks[position / STEP] >> (position % STEP) & 1 == 1)
}

/// Turns scores into weights, split as tiles want them, in place: 32 of them become 32 high parts and 32 low parts. Whatever is not
/// visible of the blocks gets the weight zero.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn weights<L: Lanes>(
    lanes: L,
    softmax: Softmax,
    scores: &mut [f32],
    visible: Range<usize>,
    blocks: Range<usize>,
) -> (f32, f32) {
    let positions = blocks.start * STEP..blocks.end * STEP;
    if visible.is_empty() {
        scores[positions].fill(0.0);
        return (f32::NEG_INFINITY, 0.0);
    }
    let result = softmax.weights(lanes, scores, visible.clone());
    scores[positions.start..visible.start].fill(0.0);
    scores[visible.end..positions.end].fill(0.0);
    for block in scores[positions].chunks_exact_mut(STEP) {
        let block = block.as_mut_ptr();
        // SAFETY: all 32 numbers are read before their room is written.
        unsafe { split(block, block.cast(), block.cast::<u16>().add(STEP)) };
    }
    result
}

/// The tiles of queries of one task, at one span.
struct Tiles<'a> {
    queries: &'a Queries<'a>,
    span: usize,
    /// Rows that tiles are configured for.
    configured: usize,
}

impl Tiles<'_> {
    fn count(&self) -> usize {
        self.queries.len().div_ceil(ROWS)
    }

    fn queries_of(&self, tile: usize) -> Range<usize> {
        tile * ROWS..((tile + 1) * ROWS).min(self.queries.len())
    }

    /// The blocks of 32 positions of the span, within `positions`, that one of a tile's queries sees.
    fn blocks(&self, tile: usize, positions: Range<usize>) -> Range<usize> {
        let queries = self.queries_of(tile);
        let seen = self.seen(queries.start, queries.end - 1);
        let (start, end) = (seen.start.max(positions.start), seen.end.min(positions.end));
        if start < end { start / STEP..end.div_ceil(STEP) } else { 0..0 }
    }

    /// The positions that queries from `first` to `last` see: later ones see no earlier and no fewer positions.
    fn seen(&self, first: usize, last: usize) -> Range<usize> {
        self.queries.visible(first, self.span).start..self.queries.visible(last, self.span).end
    }

    /// Blocks of 32 positions that any query sees.
    fn all_blocks(&self) -> Range<usize> {
        let seen = self.seen(0, self.queries.len() - 1);
        seen.start / STEP..seen.end.div_ceil(STEP)
    }

    /// # Safety
    /// The machine has AMX.
    unsafe fn configure(&mut self, rows: usize) {
        if self.configured != rows {
            let mut config = TileConfig::default();
            (0..6).for_each(|tile| config.set(tile, rows, LINE));
            (6..8).for_each(|tile| config.set(tile, ROWS, LINE));
            // SAFETY: passed on from the caller.
            unsafe { config.load() };
            self.configured = rows;
        }
    }

    /// # Safety
    /// The layout is for tiles, queries are split, and `scores` has a row for every query.
    unsafe fn scores(&mut self, planes: &mut Planes, scores: &mut [f32]) {
        let head_size = self.queries.head_size();
        let (steps, plane) = (head_size / STEP, KEYS * head_size);
        let Planes { queries, memory } = planes;
        let memory = memory.grow(2 * plane).as_mut_ptr().cast::<u8>();
        let right = Right { high: memory, low: plane * 2, stride: KEYS * 4, step: ROWS * KEYS * 4 };
        let all = self.all_blocks();
        for first in (all.start / 2 * 2..all.end).step_by(KEYS / STEP) {
            let here = first.max(all.start)..(first + 2).min(all.end);
            for block in here {
                let lines = self.queries.keys(self.span * SPAN + block * STEP);
                // SAFETY: half of `head_size` rows of two lines each, side by side for two blocks.
                unsafe { lines.split(memory.add((block - first) * 2 * LINE), plane * 2, KEYS * 4) };
            }
            for tile in 0..self.count() {
                let blocks = self.blocks(tile, first * STEP..first * STEP + KEYS);
                let rows = self.queries_of(tile);
                let left = queries[tile * steps * 2 * ROWS * STEP..].as_ptr().cast::<u8>();
                let left = Left { high: left, low: ROWS * LINE, stride: LINE, step: 2 * ROWS * LINE };
                // SAFETY: the queries' rows of scores have room for whole blocks.
                unsafe {
                    self.configure(rows.len());
                    let right = right.columns((blocks.start.saturating_sub(first)) * STEP);
                    let out = scores[rows.start * SCORES_STRIDE + blocks.start * STEP..].as_mut_ptr();
                    let product = Product { left, right, steps, out, stride: SCORES_BYTES, planes: self.planes() };
                    product.run(blocks.len() * 2, true);
                }
            }
        }
    }

    /// Sums weighted values up in the state. When they are to be cleared, values that are no numbers count as zeros; gives their positions.
    ///
    /// # Safety
    /// As for `scores`, which hold weights, and `state` has a row for every query.
    unsafe fn values(&mut self, planes: &mut Planes, scores: &[f32], state: &mut State<'_>, clear: bool) -> Marks {
        let head_size = self.queries.head_size();
        // As many blocks as fit into the first-level cache beside the weights; for one tile there is no gain in several.
        let at_once = match self.count() {
            1 => 1,
            _ if head_size <= 64 => 4,
            _ => 2,
        };
        let block_bytes = STEP * head_size * 2;
        let memory = planes.memory.grow(at_once * block_bytes).as_mut_ptr().cast::<u8>();
        let low = at_once * block_bytes;
        let mut marks = [0; SPAN / STEP];
        state.values.fill(0.0);
        let all = self.all_blocks();
        for first in (all.start / at_once * at_once..all.end).step_by(at_once) {
            for block in first.max(all.start)..(first + at_once).min(all.end) {
                let lines = self.queries.values(self.span * SPAN + block * STEP);
                // SAFETY: `head_size` lines, two in a row.
                unsafe {
                    let to = memory.add((block - first) * block_bytes);
                    lines.split(to, low, 2 * LINE);
                    if clear {
                        marks[block] = lines.clear_what_is_no_number(to, low, head_size);
                    }
                }
            }
            for tile in 0..self.count() {
                let blocks = self.blocks(tile, first * STEP..(first + at_once) * STEP);
                if blocks.is_empty() {
                    continue;
                }
                let rows = self.queries_of(tile);
                let weights = scores[rows.start * SCORES_STRIDE + blocks.start * STEP..].as_ptr().cast::<u8>();
                let left = Left { high: weights, low: LINE, stride: SCORES_BYTES, step: 2 * LINE };
                let skipped = (blocks.start - first) * block_bytes;
                let right = Right { high: memory.wrapping_add(skipped), low, stride: head_size * 4, step: block_bytes };
                // SAFETY: the queries' rows of values have `head_size` numbers.
                unsafe {
                    self.configure(rows.len());
                    for column in (0..head_size).step_by(4 * ROWS) {
                        let out = state.values[rows.start * head_size + column..].as_mut_ptr();
                        let right = right.columns(column);
                        let (steps, stride) = (blocks.len(), head_size * 4);
                        let product = Product { left, right, steps, out, stride, planes: self.planes() };
                        product.run((head_size - column).div_ceil(ROWS).min(4), false);
                    }
                }
            }
        }
        marks
    }

    fn planes(&self) -> usize {
        if self.queries.pages().layout.dtype == DType::BF16 { 1 } else { 2 }
    }
}

/// Rows of high parts, of which low parts lie `low` bytes apart; `step` bytes from 32 numbers to the next.
#[derive(Clone, Copy)]
struct Left {
    high: *const u8,
    low: usize,
    stride: usize,
    step: usize,
}

/// Pairs of rows, in lines of sixteen columns.
#[derive(Clone, Copy)]
struct Right {
    high: *const u8,
    low: usize,
    stride: usize,
    step: usize,
}

impl Right {
    /// From a column on, a multiple of sixteen.
    fn columns(self, first: usize) -> Self {
        Right { high: self.high.wrapping_add(first / ROWS * LINE), ..self }
    }
}

/// `out (+)= left · right`, sixteen rows (or what tiles are configured for) by two or four times sixteen columns.
#[derive(Clone, Copy)]
struct Product {
    left: Left,
    right: Right,
    steps: usize,
    out: *mut f32,
    /// Bytes from a row of `out` to the next.
    stride: usize,
    /// Two, or one where there are no low parts on the right.
    planes: usize,
}

/// One step for one group of sixteen columns.
macro_rules! group {
    (2, $sum:literal, $at:literal) => {
        concat!(
            "tileloadd tmm6, [{bl} + {sb} + ",
            $at,
            "]\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm4, tmm6\n",
            group!(1, $sum, $at)
        )
    };
    (1, $sum:literal, $at:literal) => {
        concat!(
            "tileloadd tmm7, [{bh} + {sb} + ",
            $at,
            "]\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm4, tmm7\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm5, tmm7"
        )
    };
}

/// All steps, with these groups.
macro_rules! steps {
    ($product:expr, $($group:expr),*) => {{
        let Product { left, right, steps, .. } = $product;
        for step in 0..steps {
            let (a, b) = (left.high.add(step * left.step), right.high.add(step * right.step));
            asm!(
                "tileloadd tmm4, [{ah} + {sa}]",
                "tileloadd tmm5, [{al} + {sa}]",
                $($group,)*
                "/* {bl} */",
                ah = in(reg) a,
                al = in(reg) a.add(left.low),
                sa = in(reg) left.stride,
                bh = in(reg) b,
                bl = in(reg) b.add(right.low),
                sb = in(reg) right.stride,
                options(nostack, preserves_flags, readonly),
            );
        }
    }};
}

impl Product {
    /// # Safety
    /// The machine has AMX, tiles are configured, and rows of both sides and of `out` are as long as is said.
    #[inline(always)]
    unsafe fn run(self, groups: usize, fresh: bool) {
        // SAFETY: passed on from the caller; nothing else of the program uses tile registers.
        unsafe {
            match groups {
                0 => {}
                2 => {
                    self.begin::<2>(fresh);
                    match self.planes {
                        1 => steps!(self, group!(1, 0, 0), group!(1, 1, 64)),
                        _ => steps!(self, group!(2, 0, 0), group!(2, 1, 64)),
                    }
                    self.end::<2>();
                }
                _ => {
                    self.begin::<4>(fresh);
                    match self.planes {
                        1 => steps!(self, group!(1, 0, 0), group!(1, 1, 64), group!(1, 2, 128), group!(1, 3, 192)),
                        _ => steps!(self, group!(2, 0, 0), group!(2, 1, 64), group!(2, 2, 128), group!(2, 3, 192)),
                    }
                    self.end::<4>();
                }
            }
        }
    }

    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn begin<const GROUPS: usize>(self, fresh: bool) {
        // SAFETY: passed on from the caller.
        unsafe {
            if fresh {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, preserves_flags, nomem)
                );
                return;
            }
            asm!(
                "tileloadd tmm0, [{0} + {1}]", "tileloadd tmm1, [{0} + {1} + 64]",
                in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags, readonly),
            );
            if GROUPS == 4 {
                asm!(
                    "tileloadd tmm2, [{0} + {1} + 128]", "tileloadd tmm3, [{0} + {1} + 192]",
                    in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags, readonly),
                );
            }
        }
    }

    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn end<const GROUPS: usize>(self) {
        // SAFETY: passed on from the caller.
        unsafe {
            asm!(
                "tilestored [{0} + {1}], tmm0", "tilestored [{0} + {1} + 64], tmm1",
                in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags),
            );
            if GROUPS == 4 {
                asm!(
                    "tilestored [{0} + {1} + 128], tmm2", "tilestored [{0} + {1} + 192], tmm3",
                    in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags),
                );
            }
        }
    }
}

/// Makes 32 numbers a high and a low bf16 each, the first rounded and the second cut off; the i-th and the one sixteen later are a pair.
///
/// # Safety
/// The machine has AVX-512; there is room for 32 of each.
#[target_feature(enable = "avx512f")]
unsafe fn split(numbers: *const f32, high: *mut u16, low: *mut u16) {
    // SAFETY: passed on from the caller.
    unsafe {
        let (a, b) = (_mm512_loadu_si512(numbers.cast()), _mm512_loadu_si512(numbers.add(16).cast()));
        let (a_high, b_high) = (rounded(a), rounded(b));
        _mm512_storeu_si512(high.cast(), pairs(a_high, b_high));
        _mm512_storeu_si512(low.cast(), pairs(left_of(a, a_high), left_of(b, b_high)));
    }
}

/// Numbers rounded to bf16, in the upper halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512i) -> __m512i {
    _mm512_and_si512(_mm512_add_epi32(x, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(HIGH))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn left_of(x: __m512i, high: __m512i) -> __m512i {
    _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(high)))
}

/// The upper halves of both, as pairs.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(a: __m512i, b: __m512i) -> __m512i {
    const A_OR_B_AND_C: i32 = 0xf8;
    _mm512_ternarylogic_epi32::<A_OR_B_AND_C>(_mm512_srli_epi32::<16>(a), b, _mm512_set1_epi32(HIGH))
}

/// Sixteen halves, straight from memory: the intrinsic loads them first, which costs a third more.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn f16_to_f32(from: *const u8) -> __m512i {
    let numbers: __m512i;
    // SAFETY: passed on from the caller.
    unsafe {
        asm!("vcvtph2ps {}, ymmword ptr [{}]", lateout(zmm_reg) numbers, in(reg) from, options(pure, readonly, nostack, preserves_flags));
    }
    numbers
}

/// Rows of two lines of a block in KV memory.
#[derive(Clone, Copy)]
struct Lines {
    start: *const u8,
    rows: usize,
    stride: usize,
    dtype: DType,
    /// From here to the same place of the block that will be read next; asking for it early hides the memory's latency.
    ahead: isize,
}

impl Lines {
    /// Splits every line into its high and its low parts, `low` bytes apart.
    ///
    /// # Safety
    /// The machine has AVX-512, the lines are there, and so is room for them, `stride` bytes from row to row.
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    unsafe fn split(self, to: *mut u8, low: usize, stride: usize) {
        // SAFETY: passed on from the caller.
        unsafe {
            match self.dtype {
                DType::BF16 => self.each::<false>(to, low, stride),
                _ => self.each::<true>(to, low, stride),
            }
        }
    }

    /// # Safety
    /// As for `split`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    unsafe fn each<const F16: bool>(self, to: *mut u8, low: usize, stride: usize) {
        // SAFETY: passed on from the caller; a prefetch may go anywhere.
        unsafe {
            for row in 0..self.rows {
                for line in [0, LINE] {
                    let (from, to) = (self.start.add(row * self.stride + line), to.add(row * stride + line));
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_offset(self.ahead).cast());
                    if F16 {
                        let (a, b) = (f16_to_f32(from), f16_to_f32(from.add(LINE / 2)));
                        let mask = _mm512_set1_epi32(HIGH);
                        // Cutting off is exact here: what is left has three bits.
                        let left = pairs(left_of(a, _mm512_and_si512(a, mask)), left_of(b, _mm512_and_si512(b, mask)));
                        _mm512_storeu_si512(to.cast(), pairs(a, b));
                        _mm512_storeu_si512(to.add(low).cast(), left);
                    } else {
                        let (a, b) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(LINE / 2).cast()));
                        let b = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(b));
                        _mm512_storeu_si512(to.cast(), _mm512_or_si512(_mm512_cvtepu16_epi32(a), b));
                    }
                }
            }
        }
    }

    /// Sets values that are no numbers to zero: a weight of zero would not silence them. Gives the positions that have some.
    ///
    /// # Safety
    /// `split` has written 32 positions of `head_size` values to `to`.
    #[cold]
    unsafe fn clear_what_is_no_number(self, to: *mut u8, low: usize, head_size: usize) -> u32 {
        let mut mark = 0;
        for position in 0..STEP {
            for d in 0..head_size {
                let line = (position % ROWS * (head_size / ROWS) + d / ROWS) * LINE;
                let at = line + d % ROWS * 4 + position / ROWS * 2;
                // SAFETY: passed on from the caller.
                unsafe {
                    let high = to.add(at).cast::<u16>();
                    if *high & 0x7f80 == 0x7f80 {
                        *high = 0;
                        if self.dtype != DType::BF16 {
                            *to.add(at + low).cast::<u16>() = 0;
                        }
                        mark |= 1 << position;
                    }
                }
            }
        }
        mark
    }
}
