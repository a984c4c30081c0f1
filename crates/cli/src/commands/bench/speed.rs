//! Prefill and decode without the engine, and without the sampling that the CPU would do.
//!
//! Every round measures every case once, so that other load on the machine affects all cases alike.

use std::time::Instant;

use anyhow::Result;
use pellucid_model::{BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, GatherStats, KvMemory, Logits, Model};
use pellucid_tensor::{RowQuery, StateSave};
use serde::Serialize;

use super::SpeedArgs;
use super::model::Ready;
use super::percentiles::median;
use crate::flags::usage_error::bail_usage;

/// The measurements of one case: a row of the table of results.
#[derive(Debug, Serialize)]
pub(super) struct CaseResult {
    #[serde(flatten)]
    pub(super) case: Case,
    /// Median and best over rounds (prefill) or steps (decode).
    pub(super) tokens_per_second: f64,
    pub(super) best_tokens_per_second: f64,
    pub(super) step_ms: f64,
    /// Bandwidth of a decode step as a fraction of the read limit.
    pub(super) fraction_of_read_limit: Option<f64>,
    /// Arithmetic rate of the weights alone, without attention.
    pub(super) tflops: f64,
    /// Gathers of a prompt or of a decode step; `None` with one rank.
    pub(super) gathers: Option<Gathers>,
}

/// Gathers between ranks, as means.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Gathers {
    pub(super) number: f64,
    pub(super) bytes: f64,
    /// Time of the exchange, and of waiting for slower ranks.
    pub(super) ms: f64,
}

impl Gathers {
    /// Returns the means of `times` prompts or steps between two readings of the counters.
    fn between(before: GatherStats, after: GatherStats, times: usize) -> Gathers {
        let mean = |total: f64| total / times as f64;
        Gathers {
            number: mean((after.num_gathers - before.num_gathers) as f64),
            bytes: mean((after.bytes - before.bytes) as f64),
            ms: mean((after.time - before.time).as_secs_f64() * 1e3),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub(super) enum Case {
    Prefill { tokens: usize },
    Decode { sequences: usize, depth: usize },
}

pub(super) fn run(args: &SpeedArgs, cases: &[Case], ready: &mut Ready, read_speed: f64) -> Result<Vec<CaseResult>> {
    let mut bench = SpeedBench::new(ready, cases, args.generate as usize)?;
    let mut seconds: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    let mut gathers = vec![None; cases.len()];
    for _ in 0..args.repeat {
        for ((case, seconds), gathers) in cases.iter().zip(&mut seconds).zip(&mut gathers) {
            let times = match *case {
                Case::Prefill { tokens } => {
                    seconds.push(bench.prefill(tokens)?);
                    1
                }
                Case::Decode { sequences, depth } => {
                    seconds.extend(bench.decode(sequences, depth, args.generate as usize)?);
                    args.generate as usize
                }
            };
            // Those of the last round.
            let (before, after) = (bench.gathers_before, bench.ready.model.gather_stats());
            *gathers = before.zip(after).map(|(before, after)| Gathers::between(before, after, times));
        }
    }
    let cost = bench.ready.model.token_cost();
    let position_bytes = bench.kv.bytes_per_position() as f64;
    let rows = cases.iter().zip(&mut seconds).zip(gathers).map(|((&case, seconds), gathers)| {
        let middle = median(seconds);
        let (tokens, bytes) = match case {
            Case::Prefill { tokens } => (tokens as f64, None),
            Case::Decode { sequences, depth } => {
                // On average, half of the generated tokens are in the KV memory beside `depth`.
                let positions = sequences as f64 * (depth as f64 + f64::from(args.generate) / 2.0);
                (sequences as f64, Some(cost.weight_bytes as f64 + positions * position_bytes))
            }
        };
        CaseResult {
            case,
            tokens_per_second: tokens / middle,
            best_tokens_per_second: tokens / seconds[0],
            step_ms: middle * 1e3,
            // Several devices have a limit each, which depends on what they have.
            fraction_of_read_limit: (bytes.filter(|_| !bench.ready.model.devices().are_several()))
                .map(|bytes| bytes / read_speed / middle),
            tflops: 2.0 * cost.products as f64 * tokens / middle / 1e12,
            gathers,
        }
    });
    Ok(rows.collect())
}

/// Returns the cases: prefill of every length, then decode at every batch size and depth. Fails for a case that does
/// not fit into the context.
pub(super) fn cases(args: &SpeedArgs, context: usize) -> Result<Vec<Case>> {
    let numbers = |given: &Option<Vec<u32>>, default: u32| -> Vec<usize> {
        given.as_deref().unwrap_or(&[default]).iter().map(|&n| n as usize).collect()
    };
    let mut cases: Vec<Case> = numbers(&args.prompt, 512).into_iter().map(|tokens| Case::Prefill { tokens }).collect();
    for depth in numbers(&args.depth, 0) {
        cases.extend(numbers(&args.batch, 1).into_iter().map(|sequences| Case::Decode { sequences, depth }));
    }
    for case in &cases {
        let positions = case.positions(args.generate as usize);
        if positions > context {
            let flags = if matches!(case, Case::Prefill { .. }) { "--prompt" } else { "--depth and --generate" };
            bail_usage!("{flags}: {positions} positions, but the model's context holds {context}");
        }
    }
    Ok(cases)
}

impl Case {
    fn num_sequences(self) -> usize {
        if let Case::Decode { sequences, .. } = self { sequences } else { 1 }
    }

    /// Positions of each sequence at the end.
    fn positions(self, generate: usize) -> usize {
        match self {
            Case::Prefill { tokens } => tokens,
            Case::Decode { depth, .. } => depth.max(1) + generate,
        }
    }
}

/// Decoding steps whose mean is one measurement if steps overlap.
const STEPS_TOGETHER: usize = 8;

struct SpeedBench<'a> {
    ready: &'a mut Ready,
    kv: KvMemory,
    batch: Batch,
    /// Logits of alternating steps.
    logits: [Logits; 2],
    /// The counters of gathers before the measurement that ran last.
    gathers_before: Option<GatherStats>,
}

impl SpeedBench<'_> {
    fn new<'a>(ready: &'a mut Ready, cases: &[Case], generate: usize) -> Result<SpeedBench<'a>> {
        let blocks = |case: &Case| case.num_sequences() * case.positions(generate).div_ceil(BLOCK_LEN);
        let num_blocks = cases.iter().map(blocks).max().unwrap_or(0);
        let kv = KvMemory::new(ready.model.config(), ready.model.devices(), ready.kv_dtype, num_blocks, BLOCK_LEN)?;
        // A sequence's state is in the slot with the number of its first block.
        let kv = kv.with_states(ready.model.config(), ready.model.devices(), num_blocks)?;
        Ok(SpeedBench { ready, kv, batch: Batch::default(), logits: Default::default(), gathers_before: None })
    }

    /// Returns the seconds for a whole prompt, with the logits after it.
    fn prefill(&mut self, tokens: usize) -> Result<f64> {
        let blocks: Vec<u32> = (0..tokens.div_ceil(BLOCK_LEN) as u32).collect();
        let ids = self.ids(tokens);
        self.gathers_before = self.ready.model.gather_stats();
        let started = Instant::now();
        let mut position = 0;
        for ids in ids.chunks(self.ready.backend.chunk_len()) {
            let len = ids.len();
            self.batch.clear();
            let wanted = if position + ids.len() == tokens { ids.len() - 1..ids.len() } else { 0..0 };
            let (ids, first_position) = (ChunkIds::Tokens(ids), position);
            let save = StateSave { row: len as u32 - 1, slot: blocks[0] };
            let state = ChunkState::in_place(first_position, &save);
            self.batch.push(Chunk { ids, first_position, blocks: &blocks, wanted, queries: &[], state }, BLOCK_LEN);
            self.ready.model.forward(&self.batch, &mut self.kv, &mut self.logits[0])?;
            position += len;
        }
        Ok(started.elapsed().as_secs_f64())
    }

    /// Returns the seconds of each step in which `sequences` sequences decode one token each. If the device can
    /// continue with its own guess of the token, a step is launched before the step before it has ended, as in the
    /// engine; its time is then measured from end to end.
    fn decode(&mut self, sequences: usize, depth: usize, generate: usize) -> Result<Vec<f64>> {
        let depth = depth.max(1);
        let per_sequence = (depth + generate).div_ceil(BLOCK_LEN);
        self.prefill(depth)?;
        // The other sequences get copies of the first one's keys and values: only the bytes read matter for the speed.
        for sequence in 1..sequences {
            for block in 0..depth.div_ceil(BLOCK_LEN) {
                let to = (sequence * per_sequence + block) as u32;
                self.kv.copy_block(self.ready.model.devices(), block as u32, to)?;
            }
        }
        let is_asynchronous = self.ready.model.supports_digests() && self.ready.model.is_asynchronous(sequences);
        let ids = self.ids(generate + sequences);
        self.gathers_before = self.ready.model.gather_stats();
        let started = Instant::now();
        let mut ends = vec![0.0];
        for step in 0..generate {
            let follows = is_asynchronous && step > 0;
            let tokens = (!follows).then_some(&ids[step..step + sequences]);
            self.plan(sequences, per_sequence, depth + step, tokens);
            self.ready.model.launch(&self.batch, &mut self.kv, &mut self.logits[step % 2])?;
            // With look-ahead, no step ends before the first one is launched.
            if is_asynchronous == follows {
                self.ready.model.finish(&mut self.logits[(step - usize::from(follows)) % 2])?;
                ends.push(started.elapsed().as_secs_f64());
            }
        }
        if is_asynchronous {
            self.ready.model.finish(&mut self.logits[(generate - 1) % 2])?;
            ends.push(started.elapsed().as_secs_f64());
        }
        // If the end of a step is noticed late, the next step seems short. Therefore the mean over several steps is one
        // measurement, and the first steps, in which the device may still warm up, are left out.
        let (first, together) =
            if is_asynchronous { (generate / 4, (generate / 2).clamp(1, STEPS_TOGETHER)) } else { (0, 1) };
        let several = ends[first..].windows(together + 1);
        Ok(several.map(|ends| (ends[together] - ends[0]) / together as f64).collect())
    }

    /// Plans a step in which every sequence decodes its token at `position`: one of `tokens`, or the one that the
    /// device assumed.
    fn plan(&mut self, sequences: usize, per_sequence: usize, position: usize, tokens: Option<&[u32]>) {
        let blocks: Vec<u32> = (0..(sequences * per_sequence) as u32).collect();
        let digests = self.ready.model.supports_digests();
        self.batch.clear();
        for (sequence, blocks) in blocks.chunks_exact(per_sequence).enumerate() {
            // Sampling at temperature 1 reads the whole row.
            let race = Some((sequence as u64, position as u32 + 1));
            let query = digests.then_some(RowQuery { temperature: 1.0, race, shortlist: None });
            let ids = match tokens {
                Some(tokens) => ChunkIds::Tokens(&tokens[sequence..=sequence]),
                None => ChunkIds::Assumed { row: sequence },
            };
            let queries = query.as_slice();
            let save = StateSave { row: 0, slot: blocks[0] };
            let state = ChunkState::in_place(position, &save);
            self.batch.push(Chunk { ids, first_position: position, blocks, wanted: 0..1, queries, state }, BLOCK_LEN);
        }
    }

    /// Returns a token such that successive ones are spread over the vocabulary and rows of the embedding are not
    /// reused.
    fn ids(&self, len: usize) -> Vec<u32> {
        let vocab_size = self.ready.model.config().vocab_size as u64;
        (0..len as u64).map(|i| (i * 7919 % vocab_size) as u32).collect()
    }
}
