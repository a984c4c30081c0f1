//! The operations that a transformer needs of a device, and the words in which `model` asks for them.
//!
//! Every operation writes into an output that the caller owns. A row of an output depends on the same row of the inputs alone
//! (and, for attention, on the keys and values at its own and earlier positions): how many rows there are, and which, plays no
//! part in the arithmetic of one. That is the ground of batch invariance, and a backend that cannot promise it says so.
//!
//! Shapes are checked by `assert!`: a wrong shape is a mistake in `model`, never in a user's file.

use std::any::Any;
use std::fmt;
use std::ops::Range;

use crate::{DType, SharedBytes, Tensor};

/// What can go wrong on a device while its operations are used as intended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("out of memory on {device}: {bytes} bytes were asked for")]
    OutOfMemory { device: String, bytes: usize },
    #[error("{device} failed in {operation}: {reason}")]
    Device { device: String, operation: &'static str, reason: String },
    /// Nothing that was on the device is there any more, and nothing that is asked of it will be done.
    #[error("{device} was lost in {operation}: {reason}")]
    Lost { device: String, operation: &'static str, reason: String },
}

/// A weight on its way from a file to a device: `rows` x `cols` numbers of `dtype`.
#[derive(Debug, Clone)]
pub struct HostWeight {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub bytes: SharedBytes,
}

/// The nonlinearity of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// x * Phi(x), with the error function
    Gelu,
    /// x * Phi(x), with the tanh approximation
    GeluTanh,
}

/// Which two numbers of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// i and i + half: Hugging Face files, and most GGUF architectures.
    Half,
    /// 2i and 2i + 1: GGUF files of the Llama architecture, whose converter reorders the rows of Wq and Wk for it.
    Interleaved,
}

/// The rows of a step that belong to one sequence, and the blocks that hold its keys and values.
///
/// `rows` are consecutive rows of the step; `blocks` is a range of the step's flat block tables. Position p of the sequence lies in
/// block `block_tables[blocks.start + p / block_len]` at offset `p % block_len`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceSpan {
    pub rows: Range<usize>,
    pub blocks: Range<usize>,
}

/// The keys and values of one layer, in blocks: a row is a block of `kv heads * block_len * head_size` numbers, stored in the tensors'
/// format.
///
/// How a block is laid out within its row is the device's own affair: [`Backend::store_kv`] writes it, [`Backend::attention`] reads it,
/// and [`Backend::copy_row`] copies it whole.
#[derive(Debug)]
pub struct KvLayer {
    pub keys: Tensor,
    pub values: Tensor,
}

/// Shape of the attention heads and of the blocks that hold their keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_size: usize,
    pub block_len: usize,
}

/// Arguments of [`Backend::rope`].
#[derive(Debug, Clone, Copy)]
pub struct Rope<'a> {
    /// From [`Backend::rope_angles`]: [rows][cos of every pair, then sin of every pair].
    pub angles: &'a Tensor,
    pub head_size: usize,
    pub style: RopeStyle,
}

/// Arguments of [`Backend::store_kv`].
#[derive(Debug)]
pub struct StoreKv<'a> {
    /// `[rows][kv heads * head_size]`
    pub keys: &'a Tensor,
    pub values: &'a Tensor,
    /// For each row, block * block_len + offset.
    pub slots: &'a [u32],
    pub shape: HeadShape,
}

/// Arguments of [`Backend::turn_and_store`]; those of [`Backend::rope`] and [`Backend::store_kv`] without what is written.
#[derive(Debug)]
pub struct TurnAndStore<'a> {
    pub rope: Rope<'a>,
    pub values: &'a Tensor,
    pub slots: &'a [u32],
    pub shape: HeadShape,
}

/// Arguments of [`Backend::attend`]: those of [`Backend::turn_and_store`] (or [`Backend::store_kv`], where nothing turns) and of
/// [`Backend::attention`], without what is written.
#[derive(Debug)]
pub struct Attend<'a> {
    pub rope: Option<Rope<'a>>,
    pub values: &'a Tensor,
    pub slots: &'a [u32],
    pub positions: &'a [u32],
    pub sequences: &'a [SequenceSpan],
    pub block_tables: &'a [u32],
    pub shape: HeadShape,
    pub scale: f32,
    pub soft_cap: Option<f32>,
    pub window: Option<usize>,
}

/// Arguments of [`Backend::attention`].
#[derive(Debug)]
pub struct Attention<'a> {
    /// `[rows][heads * head_size]`
    pub queries: &'a Tensor,
    pub kv: &'a KvLayer,
    pub positions: &'a [u32],
    pub sequences: &'a [SequenceSpan],
    pub block_tables: &'a [u32],
    pub shape: HeadShape,
    /// Factor on the dot product of query and key.
    pub scale: f32,
    /// `cap * tanh(score / cap)` when present.
    pub soft_cap: Option<f32>,
    /// A query at position p sees the positions p - window + 1 ..= p; without a window, 0 ..= p.
    pub window: Option<usize>,
}

/// A linear map: `y = W x + b`, W as `[out][in]`.
#[derive(Debug)]
pub struct Linear {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
}

/// The three maps of a gated MLP: `down(activation(gate x) * up x)`.
#[derive(Debug)]
pub struct GatedMlp {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// The rows that linear maps are applied to.
#[derive(Debug)]
pub enum Input<'a> {
    /// As they are.
    Rows(&'a Tensor),
    /// To be computed: `hidden += update`, then `normed` is the RMSNorm of it.
    Joined { update: &'a Tensor, hidden: &'a mut Tensor, weight: &'a Tensor, eps: f32, normed: &'a mut Tensor },
}

/// How a router's scores become expert weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Routing {
    pub num_selected: usize,
    /// Divide the selected probabilities by their sum.
    pub normalize: bool,
}

/// Arguments of [`Backend::expert_mlp`].
#[derive(Debug)]
pub struct ExpertMlp<'a> {
    /// `[rows][hidden]`
    pub x: &'a Tensor,
    /// `[rows][experts]`, before the softmax.
    pub router_logits: &'a Tensor,
    pub routing: Routing,
    pub experts: &'a [GatedMlp],
    pub activation: Activation,
}

/// What the operations of one step are told about its rows: the very slices that they will be given.
#[derive(Debug, Clone, Copy)]
pub struct StepIndex<'a> {
    /// Tokens, or [`CHOSEN`] and a row.
    pub ids: &'a [u32],
    pub positions: &'a [u32],
    pub slots: &'a [u32],
    pub wanted: &'a [u32],
    pub sequences: &'a [SequenceSpan],
    pub block_tables: &'a [u32],
    /// What is asked of each wanted row in its place; none where the rows are wanted as they are.
    pub queries: &'a [RowQuery],
    /// Tells one KV memory from another while both live: where its list of layers lies.
    pub kv_place: usize,
}

/// What a backend remembers from step to step of one model. The model keeps it and looks at nothing inside.
#[derive(Debug, Default)]
pub struct StepMemo(pub Option<Box<dyn Any + Send>>);

/// What to tell of a row of logits in place of the row, see [`Backend::digest`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowQuery {
    /// The second temperature, beside 1, at which weights are summed.
    pub temperature: f64,
    /// Seed and position of a draw from the whole row, where there is to be one.
    pub race: Option<(u64, u32)>,
    /// Where there is none: who of the highest takes part in the draw, where that can be told beforehand.
    pub shortlist: Option<Shortlist>,
}

/// Who of the most probable tokens is drawn from, and by which seed and position: the `k` highest, of those the smallest set whose share
/// of the weights reaches `p`, of those who have at least `min_p` of the highest's weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shortlist {
    pub draw: (u64, u32),
    pub k: u32,
    pub p: f32,
    pub min_p: f32,
}

/// A row of logits in brief. What its parts mean to the bit is the sampler's to say: `sampling` has the oracle.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowDigest {
    /// Every logit is a number, and the highest is finite. Otherwise the rest says nothing.
    pub is_plain: bool,
    /// The most probable tokens and their logits, from the highest down; ties to the lower token.
    pub top: Vec<(u32, f32)>,
    /// Whether `top` has every token that is not ruled out.
    pub has_all: bool,
    /// The sums of weights at temperature 1 and at the query's.
    pub totals: [f64; 2],
    /// Whoever may win the draw; empty where none was asked for, or too many may.
    pub finalists: Vec<(u32, f32)>,
    /// The token that the device takes to be chosen, where it does so: see [`CHOSEN`].
    pub assumed: Option<u32>,
}

/// An id with this bit is no token: it is the token that the device took to be chosen from row `id - CHOSEN` of the digests that it
/// made last. So a step can be launched before the one that it follows has ended. Only for devices whose digests tell what they assume;
/// where they assume nothing the id stands for any token, and what comes of it means nothing.
pub const CHOSEN: u32 = 1 << 31;

/// Stands for digests on their way to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DigestTicket(pub u64);

/// Numbers on the host's side, to be read back into.
pub trait HostFloats: Send + Sync + fmt::Debug {
    fn get(&self) -> &[f32];
    fn get_mut(&mut self) -> &mut [f32];
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

impl HostFloats for Vec<f32> {
    fn get(&self) -> &[f32] {
        self
    }

    fn get_mut(&mut self) -> &mut [f32] {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// A device that can run a transformer.
pub trait Backend: Send + Sync + fmt::Debug {
    /// What computes, in words: device, instruction set, threads.
    fn description(&self) -> String;

    /// What whoever loaded a model should hear of how its weights are stored, a line each.
    fn remarks(&self) -> Vec<String> {
        Vec::new()
    }

    /// The format of activations.
    fn activation_dtype(&self) -> DType;

    /// Rows of a step that keep the device busy: a prompt is computed in chunks of this many.
    fn chunk_len(&self) -> usize {
        512
    }

    /// Whether operations return before they are done: the device computes by itself, and only who reads from it waits.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Whether [`Backend::expert_mlp`] of so many rows does as well: with many, the host may be needed in the middle of a step.
    fn experts_run_ahead(&self, num_rows: usize, num_experts: usize, routing: Routing) -> bool {
        let _ = (num_rows, num_experts, routing);
        self.runs_ahead()
    }

    /// Bytes that can still be taken; `None` where nobody tells.
    fn free_memory(&self) -> Option<u64>;
    /// Bytes a second that the device reads from a buffer of `size` bytes, measured now: the limit that decoding runs against.
    fn read_bandwidth(&self, size: usize) -> Result<f64, Error>;

    // Memory.

    /// Memory of the host for `len` numbers, into which they are read fastest.
    fn host_floats(&self, len: usize) -> Result<Box<dyn HostFloats>, Error> {
        Ok(Box::new(vec![0.0; len]))
    }
    /// A tensor of zeros.
    fn zeros(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor, Error>;
    /// Makes an activation `rows` long, growing its memory when needed; what it held is lost.
    fn resize_rows(&self, tensor: &mut Tensor, rows: usize) -> Result<(), Error>;
    /// Brings a table or a vector to the device, to be read by rows. A CPU keeps a mapped file's bytes where they are.
    fn weight(&self, weight: HostWeight) -> Result<Tensor, Error>;
    /// Brings the matrix of a [`Linear`] to the device, in whatever layout its products are fastest in.
    fn linear_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        self.weight(weight)
    }
    /// The same for a matrix that meets few rows at a time, as those of experts and the output projection do.
    fn few_rows_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        self.linear_weight(weight)
    }
    /// Copies numbers to the host as f32.
    fn read(&self, tensor: &Tensor, out: &mut [f32]) -> Result<(), Error>;
    /// Brings an f32 tensor's numbers to the host, into memory of [`Backend::host_floats`] that has room for them. What the tensor holds
    /// afterwards is not promised: where both are the host's, they may change places.
    fn read_out(&self, tensor: &mut Tensor, out: &mut dyn HostFloats) -> Result<(), Error> {
        self.read(tensor, &mut out.get_mut()[..tensor.len()])
    }
    /// Copies one row to the host as f32.
    fn read_row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) -> Result<(), Error>;
    /// Copies one row of a tensor over another.
    fn copy_row(&self, from: usize, to: usize, tensor: &mut Tensor) -> Result<(), Error>;
    /// Fills an activation from the host.
    fn write(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), Error>;

    // Logits.

    /// Tokens that a digest lists at most, where the device makes digests of rows of `cols` logits: worth it where rows are far from
    /// whoever samples.
    fn digest_len(&self, cols: usize) -> Option<usize> {
        let _ = cols;
        None
    }
    /// Makes the digest of each row; may be the end of a step, which is then told of the same queries.
    fn digest(&self, logits: &Tensor, queries: &[RowQuery]) -> Result<(), Error> {
        let _ = (logits, queries);
        unreachable!("a device without digests is asked for none")
    }
    /// Begins to copy the digests of so many rows that were made last; they may be read until two more were fetched.
    fn fetch_digests(&self, num_rows: usize) -> Result<DigestTicket, Error> {
        let _ = num_rows;
        unreachable!("a device without digests is asked for none")
    }
    /// Waits for digests that were fetched. `out` is as long as there were rows.
    fn read_digests(&self, ticket: DigestTicket, out: &mut [RowDigest]) -> Result<(), Error> {
        let _ = (ticket, out);
        unreachable!("a device without digests is asked for none")
    }

    // Steps.

    /// Runs the operations of one step, which `run` calls in the same order, on the same tensors, for every step with as many rows,
    /// wanted rows and queries. A backend may therefore record them once and replay them later without calling `run`.
    fn step(
        &self,
        index: &StepIndex<'_>,
        memo: &mut StepMemo,
        run: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _ = (index, memo);
        run()
    }

    // From ids to rows, and choosing rows.

    /// `out[r] = scale * table[ids[r]]`; an id may be a row's, see [`CHOSEN`].
    fn embed(&self, table: &Tensor, ids: &[u32], scale: f32, out: &mut Tensor) -> Result<(), Error>;
    /// `out[r] = x[rows[r]]`
    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), Error>;

    // Normalisation, residuals, caps.

    /// `out = x / sqrt(mean(x^2) + eps) * weight`, over each stretch of `weight.len()` numbers of a row (the whole row, or a head).
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error>;
    /// `out = (x - mean) / sqrt(var + eps) * weight + bias`
    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error>;
    /// `x += y`
    fn add(&self, y: &Tensor, x: &mut Tensor) -> Result<(), Error>;
    /// `x += y`, then `out` is the RMSNorm of x.
    fn add_rms_norm(
        &self,
        y: &Tensor,
        x: &mut Tensor,
        weight: &Tensor,
        eps: f32,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        self.add(y, x)?;
        self.rms_norm(x, weight, eps, out)
    }
    /// `x = cap * tanh(x / cap)`
    fn soft_cap(&self, cap: f32, x: &mut Tensor) -> Result<(), Error>;

    // Linear maps and the MLP.

    /// `out = W x + b` for each row x.
    fn linear(&self, x: &Tensor, linear: &Linear, out: &mut Tensor) -> Result<(), Error>;
    /// The rows of an input, computed where they are not there yet.
    fn input<'a>(&self, input: Input<'a>) -> Result<&'a Tensor, Error> {
        match input {
            Input::Rows(x) => Ok(x),
            Input::Joined { update, hidden, weight, eps, normed } => {
                self.add_rms_norm(update, hidden, weight, eps, normed)?;
                Ok(normed)
            }
        }
    }
    /// Several maps of the same rows, such as queries, keys and values: a device may do them at once.
    fn linears(&self, x: Input<'_>, maps: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
        let x = self.input(x)?;
        maps.iter_mut().try_for_each(|(linear, out)| self.linear(x, linear, out))
    }
    /// The first two maps of a gated MLP: `gate = activation(gate x) * (up x)`. What `up` holds afterwards is not promised.
    fn gated(
        &self,
        x: Input<'_>,
        [(gate, gate_out), (up, up_out)]: [(&Linear, &mut Tensor); 2],
        activation: Activation,
    ) -> Result<(), Error> {
        self.linears(x, &mut [(gate, gate_out), (up, up_out)])?;
        self.gate(activation, up_out, gate_out)
    }
    /// `x = activation(x)`
    fn activate(&self, activation: Activation, x: &mut Tensor) -> Result<(), Error>;
    /// `gate = activation(gate) * up`
    fn gate(&self, activation: Activation, up: &Tensor, gate: &mut Tensor) -> Result<(), Error>;
    /// The weighted sum, over each row's selected experts in ascending order, of their gated MLPs.
    fn expert_mlp(&self, experts: ExpertMlp<'_>, out: &mut Tensor) -> Result<(), Error>;

    // Attention.

    /// The angles of a step, `cos` and `sin` of `position * frequency`, times `factor`: one row for each position.
    fn rope_angles(&self, positions: &[u32], frequencies: &[f32], factor: f32, out: &mut Tensor) -> Result<(), Error>;
    /// Turns the first `2 * frequencies` numbers of each head of `x` by the row's angles.
    fn rope(&self, rope: Rope<'_>, x: &mut Tensor) -> Result<(), Error>;
    /// Writes each row's key and value into its slot, each head rounded to the format of the blocks by itself. A number that the format
    /// cannot hold becomes a NaN, so that whoever reads it gets no number either: nothing is cut off in silence.
    fn store_kv(&self, store: StoreKv<'_>, kv: &mut KvLayer) -> Result<(), Error>;
    /// Turns queries and keys by the rows' angles, and stores keys and values.
    fn turn_and_store(
        &self,
        turn: TurnAndStore<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
    ) -> Result<(), Error> {
        let TurnAndStore { rope, values, slots, shape } = turn;
        self.rope(rope, queries)?;
        self.rope(rope, keys)?;
        self.store_kv(StoreKv { keys, values, slots, shape }, kv)
    }
    /// Softmax attention of each row over its sequence's keys and values as they are stored, its own included.
    fn attention(&self, attention: Attention<'_>, out: &mut Tensor) -> Result<(), Error>;
    /// All of it: turns queries and keys where there are angles, stores keys and values, and attends. What `queries` and `keys` hold
    /// afterwards is not promised. A block that a sequence stores into is no other sequence's of the step: one may read while the other
    /// stores.
    fn attend(
        &self,
        attend: Attend<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let Attend { rope, values, slots, positions, sequences, block_tables, shape, scale, soft_cap, window } = attend;
        match rope {
            Some(rope) => self.turn_and_store(TurnAndStore { rope, values, slots, shape }, queries, keys, kv)?,
            None => self.store_kv(StoreKv { keys, values, slots, shape }, kv)?,
        }
        let attention = Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window };
        self.attention(attention, out)
    }
}
