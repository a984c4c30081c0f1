//! Arguments of the operations of [`Backend`](crate::Backend), and the parts of a model that they read.

use std::any::Any;
use std::ops::Range;

use crate::{DType, SharedBytes, Tensor};

/// A weight that is read from a file and sent to a device: `rows` x `cols` values of `dtype`.
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
    /// gpt-oss, for gates alone: `x * sigmoid(1.702 x) * (up + 1)`, with x at most 7 and up from -7 to 7.
    ClampedSwiglu,
    /// max(x, 0)^2. Needs [`Extension::SquaredRelu`](crate::Extension::SquaredRelu).
    SquaredRelu,
}

/// Which two values of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// i and i + half: Hugging Face files, and most GGUF architectures.
    Half,
    /// 2i and 2i + 1: GGUF files of the Llama architecture, whose converter reorders the rows of Wq and Wk for it.
    Interleaved,
}

/// The rows of a step that belong to one sequence, and the blocks that hold its keys and values.
///
/// `rows` are consecutive rows of the step; `blocks` is a range of the step's flat block tables. Position p of the
/// sequence lies in block `block_tables[blocks.start + p / block_len]` at offset `p % block_len`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceSpan {
    pub rows: Range<usize>,
    pub blocks: Range<usize>,
}

/// The states of one sequence in a step, for layers with a recurrence.
///
/// A state is the memory of a recurrent layer after some position. The rows of a tensor of states are slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSpan {
    /// Slot of the state before the sequence's first row of the step; `None` for zeros.
    pub from: Option<u32>,
    /// Range of the step's flat list of saves, in the order of their rows.
    pub saves: Range<usize>,
}

/// A slot that the state after a row is saved to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSave {
    /// Row, counted from the start of the chunk or, in a step, from the sequence's first row.
    pub row: u32,
    pub slot: u32,
}

/// Arguments of [`Backend::short_convolution`](crate::Backend::short_convolution). Needs
/// [`Extension::ShortConvolution`](crate::Extension::ShortConvolution).
#[derive(Debug)]
pub struct ShortConvolution<'a> {
    /// `[rows][3 * channels]`: the gate of the input, the gate of the output, and the input.
    pub projected: &'a Tensor,
    /// `[taps][channels]`: the weights of the oldest position first.
    pub taps: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub sequences: &'a [SequenceSpan],
    /// One for each sequence.
    pub states: &'a [StateSpan],
    pub saves: &'a [StateSave],
}

/// Sizes of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetShape {
    pub num_key_heads: usize,
    /// Number of heads with a matrix of their own; a multiple of `num_key_heads`.
    pub num_value_heads: usize,
    /// Number of values of a query or key.
    pub key_size: usize,
    /// Number of values of a value.
    pub value_size: usize,
    /// Number of positions of the convolution, the row's own included.
    pub num_taps: usize,
}

impl DeltaNetShape {
    /// Returns the number of value heads that read one key head.
    pub fn values_per_key(self) -> usize {
        self.num_value_heads / self.num_key_heads
    }

    /// Returns the number of channels of the convolution: queries, keys and values.
    pub fn num_channels(self) -> usize {
        2 * self.num_key_heads * self.key_size + self.output_size()
    }

    /// Returns the number of values in a row of the output, which is that of the gate too.
    pub fn output_size(self) -> usize {
        self.num_value_heads * self.value_size
    }

    /// Returns the number of values of a state: the inputs of the last `num_taps - 1` positions, the oldest first, then
    /// a matrix of `key_size` x `value_size` for each value head.
    pub fn state_len(self) -> usize {
        (self.num_taps - 1) * self.num_channels() + self.num_value_heads * self.key_size * self.value_size
    }
}

/// The order of value heads, by which each of them finds its key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueHeadOrder {
    /// The value heads of a key head are adjacent: Hugging Face files.
    Grouped,
    /// One value head of each key head, then the next one of each: GGUF files of Qwen 3.5.
    Tiled,
}

impl ValueHeadOrder {
    /// Returns the index of the value head with number `i` among those of a key head.
    pub fn value_head(self, shape: DeltaNetShape, key_head: usize, i: usize) -> usize {
        match self {
            ValueHeadOrder::Grouped => key_head * shape.values_per_key() + i,
            ValueHeadOrder::Tiled => i * shape.num_key_heads + key_head,
        }
    }
}

/// Arguments of [`Backend::delta_net`](crate::Backend::delta_net). Needs
/// [`Extension::DeltaNet`](crate::Extension::DeltaNet).
#[derive(Debug)]
pub struct DeltaNet<'a> {
    pub shape: DeltaNetShape,
    pub order: ValueHeadOrder,
    /// `[rows][channels]`: queries, keys and values, before the convolution.
    pub projected: &'a Tensor,
    /// `[rows][value heads * value_size]`: the gate of the output.
    pub gate: &'a Tensor,
    /// `[rows][value heads]`: the strength of writing, before the sigmoid.
    pub beta: &'a Tensor,
    /// `[rows][value heads]`: the time step of the decay, before the bias and the softplus.
    pub time_step: &'a Tensor,
    /// `[taps][channels]`: the weights of the oldest position first.
    pub taps: &'a Tensor,
    /// Rate of the decay for each value head; negative.
    pub decay: &'a Tensor,
    /// Added to the time step of each value head.
    pub time_bias: &'a Tensor,
    /// RMSNorm of each value head's output.
    pub norm: RmsNorm<'a>,
    pub sequences: &'a [SequenceSpan],
    /// One for each sequence.
    pub states: &'a [StateSpan],
    pub saves: &'a [StateSave],
}

/// The keys and values of one layer, in blocks: a row is a block of `kv heads * block_len * head_size` values, stored
/// in the tensors' format.
///
/// Each backend chooses the layout of a block within its row: [`Backend::store_kv`](crate::Backend::store_kv) writes
/// it, [`Backend::attention`](crate::Backend::attention) reads it, and [`Backend::copy_row`](crate::Backend::copy_row)
/// copies it whole.
#[derive(Debug)]
pub struct KvLayer {
    pub keys: Tensor,
    /// Without rows if the values are parts of the keys.
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

/// Arguments of [`Backend::rope`](crate::Backend::rope).
#[derive(Debug, Clone, Copy)]
pub struct Rope<'a> {
    /// From [`Backend::rope_angles`](crate::Backend::rope_angles): [rows][cos of every pair, then sin of every pair].
    pub angles: &'a Tensor,
    pub head_size: usize,
    pub style: RopeStyle,
}

/// Arguments of [`Backend::store_kv`](crate::Backend::store_kv).
#[derive(Debug)]
pub struct StoreKv<'a> {
    /// `[rows][kv heads * head_size]`
    pub keys: &'a Tensor,
    pub values: &'a Tensor,
    /// For each row, block * block_len + offset.
    pub slots: &'a [u32],
    pub shape: HeadShape,
}

/// Read-only arguments of [`Backend::rotate_and_store`](crate::Backend::rotate_and_store).
#[derive(Debug)]
pub struct RotateAndStore<'a> {
    pub rope: Rope<'a>,
    pub values: &'a Tensor,
    pub slots: &'a [u32],
    pub shape: HeadShape,
}

/// The values of attention.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// Rows to store: `[rows][kv heads * head_size]`.
    Rows(&'a Tensor),
    /// The values of each key from index `first` on. Nothing but keys is stored, and a head of the output has
    /// `head_size - first` values. Needs [`Extension::LatentAttention`](crate::Extension::LatentAttention).
    InKeys { first: usize },
}

impl<'a> Values<'a> {
    /// Returns the rows to store, for a backend without latent attention.
    pub fn rows(self) -> &'a Tensor {
        match self {
            Values::Rows(rows) => rows,
            Values::InKeys { .. } => unreachable!("`supports` says that there is no latent attention"),
        }
    }
}

/// Read-only arguments of [`Backend::attend`](crate::Backend::attend).
#[derive(Debug)]
pub struct Attend<'a> {
    /// Rotates queries and keys; `None` for models without rotary positions.
    pub rope: Option<Rope<'a>>,
    pub values: Values<'a>,
    pub slots: &'a [u32],
    pub positions: &'a [u32],
    pub sequences: &'a [SequenceSpan],
    pub block_tables: &'a [u32],
    pub shape: HeadShape,
    pub scale: f32,
    pub soft_cap: Option<f32>,
    pub window: Option<usize>,
    /// A score for each head that takes part in its softmax and has no value. Needs
    /// [`Extension::AttentionSinks`](crate::Extension::AttentionSinks).
    pub sinks: Option<&'a Tensor>,
}

/// Arguments of [`Backend::attention`](crate::Backend::attention).
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

/// Arguments of [`Backend::bidirectional_attention`](crate::Backend::bidirectional_attention).
#[derive(Debug, Clone, Copy)]
pub struct BidirectionalAttention<'a> {
    /// `[rows][heads * head_size]`
    pub queries: &'a Tensor,
    pub kv: &'a KvLayer,
    /// For each row, the first and the last position that it sees. Neither decreases from row to row of a sequence.
    pub first_visible: &'a [u32],
    pub last_visible: &'a [u32],
    pub sequences: &'a [SequenceSpan],
    pub block_tables: &'a [u32],
    pub shape: HeadShape,
    /// Factor on the dot product of query and key.
    pub scale: f32,
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

/// The two maps of an MLP without a gate: `down(activation(up x))`.
#[derive(Debug)]
pub struct PlainMlp {
    pub up: Linear,
    pub down: Linear,
}

/// The residual stream of a step, and an update that is still to be added to it.
///
/// A device adds an update where that costs least: in the epilogue of the product that computes it, or in the norm that
/// reads the sum. A product with [`Output::Residual`] therefore sets `pending`, and [`Input::Joined`] or
/// [`Backend::join`](crate::Backend::join) adds the update.
#[derive(Debug)]
pub struct Residual {
    /// `[rows][hidden]`
    pub hidden: Tensor,
    /// The output of attention or of an MLP, with the shape of `hidden`.
    pub update: Tensor,
    pub pending: Pending,
}

/// The part of an update that is still to be added to a residual stream.
#[derive(Debug, Default)]
pub enum Pending {
    /// None: `hidden` is complete.
    #[default]
    Nothing,
    /// The rows of `update`.
    Update,
    /// Partial sums of `update` in a form that only their backend can read. They are valid until the next product.
    PartialSums(Box<dyn Any + Send>),
}

/// The rows that linear maps are applied to.
#[derive(Debug)]
pub enum Input<'a> {
    /// These rows.
    Rows(&'a Tensor),
    /// The RMSNorm of `x`; it is also written to `normed`.
    Normed { x: &'a Tensor, weight: &'a Tensor, eps: f32, normed: &'a mut Tensor },
    /// The residual stream: its pending update is added, and the RMSNorm of the sum is written to `normed` and used.
    Joined { residual: &'a mut Residual, weight: &'a Tensor, eps: f32, normed: &'a mut Tensor },
}

/// Destination of the result of a linear map or of experts.
#[derive(Debug)]
pub enum Output<'a> {
    /// These rows.
    Rows(&'a mut Tensor),
    /// The residual stream, which must have no pending update. The contents of its `update` are unspecified afterwards.
    Residual(&'a mut Residual),
}

impl<'a> Output<'a> {
    /// Returns the tensor to write, for a backend that leaves the addition to the operation that reads the stream.
    pub fn rows(self) -> &'a mut Tensor {
        match self {
            Output::Rows(rows) => rows,
            Output::Residual(residual) => {
                residual.pending = Pending::Update;
                &mut residual.update
            }
        }
    }
}

/// Weight and epsilon of an RMSNorm.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    pub weight: &'a Tensor,
    pub eps: f32,
}

/// Arguments of [`Backend::gated_mlp`](crate::Backend::gated_mlp) beside the residual stream.
#[derive(Debug)]
pub struct GatedMlpCall<'a> {
    pub mlp: &'a GatedMlp,
    pub activation: Activation,
    /// The norm of the residual stream that is the input; `None` if `normed` holds the input already.
    pub norm: Option<RmsNorm<'a>>,
    pub normed: &'a mut Tensor,
    /// Work areas for the outputs of the maps `gate` and `up`.
    pub gate: &'a mut Tensor,
    pub up: &'a mut Tensor,
    /// Whether the result is added to the residual stream. Otherwise it is written to `update`, because a norm is
    /// applied to it first.
    pub adds_to_stream: bool,
}

/// How a router's logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// How a router's scores become expert weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    pub num_selected: usize,
    /// Divide the selected scores by their sum.
    pub normalize: bool,
    pub scoring: Scoring,
    /// Factor of the weights.
    pub scale: f32,
    /// Number of groups of adjacent experts, and the number of groups from which experts are selected. Sigmoid scores
    /// rank groups by the sum of their two highest scores, a softmax by their highest score.
    pub groups: Option<(usize, usize)>,
}

impl Routing {
    /// The highest probabilities of a softmax over all experts.
    pub const fn softmax(num_selected: usize, normalize: bool) -> Routing {
        Routing { num_selected, normalize, scoring: Scoring::Softmax, scale: 1.0, groups: None }
    }
}

/// Arguments of [`Backend::expert_mlp`](crate::Backend::expert_mlp) and, with experts that have no gate, of
/// [`Backend::plain_expert_mlp`](crate::Backend::plain_expert_mlp).
#[derive(Debug)]
pub struct ExpertMlp<'a, Expert = GatedMlp> {
    /// `[rows][hidden]`
    pub x: &'a Tensor,
    /// `[rows][experts]`, before the softmax.
    pub router_logits: &'a Tensor,
    pub routing: Routing,
    /// Added to the score of each expert for the selection alone. Needs
    /// [`Extension::SigmoidRouter`](crate::Extension::SigmoidRouter).
    pub score_bias: Option<&'a Tensor>,
    /// Factor of the weight of each expert, after weights are normalised. Needs
    /// [`Extension::ExpertScales`](crate::Extension::ExpertScales).
    pub expert_scales: Option<&'a Tensor>,
    pub experts: &'a [Expert],
    pub activation: Activation,
}
