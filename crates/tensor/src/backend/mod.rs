//! [`Backend`]: the operations that a transformer needs of a device.
//!
//! Every operation writes into an output that the caller owns. A row of an output depends on the same row of the inputs
//! alone (and, for attention, on the keys and values at its own and earlier positions), not on the number of rows or on
//! other rows. That makes results batch invariant. A backend without this property says so in its
//! [`Backend::description`].
//!
//! Operations that a device can fuse into fewer launches are one operation here: [`Input::Joined`] and
//! [`Input::Normed`] (a norm and the linear maps that read it), [`Output::Residual`] (a linear map and the sum that its
//! result goes into), [`Backend::gated_mlp`] and [`Backend::attend`]. Each has a default implementation by the separate
//! operations, which gives the same bits.
//!
//! Shapes are checked by `assert!`: a wrong shape is a mistake in `model`, never in a user's file.

mod arguments;
mod extension;
mod host_floats;
mod mamba2;
mod step;

pub use arguments::{
    Activation, Attend, Attention, BidirectionalAttention, DeltaNet, DeltaNetShape, ExpertMlp, GatedMlp, GatedMlpCall,
    HeadShape, HostWeight, Input, KvLayer, Linear, Output, Pending, PlainMlp, Residual, RmsNorm, Rope, RopeStyle,
    RotateAndStore, Routing, Scoring, SequenceSpan, ShortConvolution, StateSave, StateSpan, StoreKv, ValueHeadOrder,
    Values,
};
pub use extension::Extension;
pub use host_floats::HostFloats;
pub use mamba2::{Mamba2, Mamba2Shape};
pub use step::{DigestTicket, RowDigest, RowQuery, Shortlist, StepIndex, StepMemo, TableRows, TokenSlots, TokenSource};

use std::fmt;

use crate::{DType, RoundedGroups, Tensor};

/// A failure of a device, not of the caller: a wrong shape panics instead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("out of memory on {device}: {bytes} bytes were requested")]
    OutOfMemory { device: String, bytes: usize },
    #[error("{device} failed in {operation}: {reason}")]
    Device { device: String, operation: &'static str, reason: String },
    /// The device's memory is lost, and every later operation of this process fails.
    #[error("{device} was lost in {operation}: {reason}")]
    Lost { device: String, operation: &'static str, reason: String },
}

/// A device that can run a transformer.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Describes the device to people: its name, instruction set, threads.
    fn description(&self) -> String;

    /// Names what the bits of results depend on, such as the instruction set. Devices with equal names give equal bits.
    fn arithmetic(&self) -> String {
        self.description()
    }

    /// Returns notes, a line each, on how the weights of the loaded model are stored.
    fn remarks(&self) -> Vec<String> {
        Vec::new()
    }

    /// The format of activations.
    fn activation_dtype(&self) -> DType;

    /// Rows of a step that keep the device busy: the length of a prefill chunk.
    fn chunk_len(&self) -> usize {
        512
    }

    /// Whether operations return before they are done: the device computes asynchronously, and only reading from it
    /// waits.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Whether [`Backend::expert_mlp`] of `num_rows` rows is asynchronous too: with many rows, it may need the host in
    /// the middle of a step.
    fn experts_are_asynchronous(&self, num_rows: usize, num_experts: usize, routing: Routing) -> bool {
        let _ = (num_rows, num_experts, routing);
        self.is_asynchronous()
    }

    /// Whether the backend has an operation that not every backend has.
    fn supports(&self, extension: Extension) -> bool {
        let _ = extension;
        false
    }

    /// Bytes that can still be allocated; `None` if the system does not say.
    fn free_memory(&self) -> Option<u64>;
    /// Returns the bytes of a matrix of `len` values on the device, which may store it in another format; `None` if the
    /// values are no whole number of the format's blocks.
    fn stored_bytes(&self, dtype: DType, len: usize) -> Option<u64> {
        dtype.bytes_for(len).map(|bytes| bytes as u64)
    }
    /// Measures the bytes per second that the device reads from a buffer of `size` bytes: the limit of decode speed.
    fn read_bandwidth(&self, size: usize) -> Result<f64, Error>;

    // Memory.

    /// Allocates host memory for `len` values: pinned memory if the device copies into that faster.
    fn host_floats(&self, len: usize) -> Result<Box<dyn HostFloats>, Error> {
        Ok(Box::new(vec![0.0; len]))
    }
    /// Allocates a tensor of zeros.
    fn zeros(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor, Error>;
    /// Gives an activation `rows` rows, growing its memory when needed. Its contents are lost.
    fn resize_rows(&self, tensor: &mut Tensor, rows: usize) -> Result<(), Error>;
    /// Copies a table or a vector to the device, to be read by rows. A CPU keeps a mapped file's bytes where they are.
    fn weight(&self, weight: HostWeight) -> Result<Tensor, Error>;
    /// Copies the matrix of a [`Linear`] to the device, in the layout in which its products are fastest.
    fn linear_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        self.weight(weight)
    }
    /// Copies the matrix of a [`Linear`] that is applied to few rows at a time: of an expert, or of the output
    /// projection.
    fn few_rows_weight(&self, weight: HostWeight) -> Result<Tensor, Error> {
        self.linear_weight(weight)
    }
    /// Copies a tensor to the host as f32.
    fn read(&self, tensor: &Tensor, out: &mut [f32]) -> Result<(), Error>;
    /// Copies an f32 tensor into host memory of [`Backend::host_floats`] that is large enough. The tensor's contents
    /// are unspecified afterwards: where both lie in host memory, the two may be swapped.
    fn read_out(&self, tensor: &mut Tensor, out: &mut dyn HostFloats) -> Result<(), Error> {
        self.read(tensor, &mut out.get_mut()[..tensor.len()])
    }
    /// Copies one row to the host as f32.
    fn read_row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) -> Result<(), Error>;
    /// Copies one row of a tensor over another.
    fn copy_row(&self, from: usize, to: usize, tensor: &mut Tensor) -> Result<(), Error>;
    /// Copies rows of one tensor into another of the same format and width: `to[first + i] = from[rows[i]]`. The bytes
    /// are copied whatever they mean, so that blocks of KV memory keep their layout.
    fn copy_rows(&self, from: &Tensor, rows: &[u32], to: &mut Tensor, first: usize) -> Result<(), Error>;
    /// Fills an activation from the host.
    fn write(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), Error>;

    // Logits.

    /// Maximum number of tokens that a digest of a row of `cols` logits lists; `None` if the device makes no digests.
    /// Digests pay off if logits would otherwise be copied from the device to the sampler.
    fn digest_len(&self, cols: usize) -> Option<usize> {
        let _ = cols;
        None
    }
    /// Makes the digest of each row. As the end of a step, `queries` are those of its [`StepIndex`].
    fn digest(&self, logits: &Tensor, queries: &[RowQuery]) -> Result<(), Error> {
        let _ = (logits, queries);
        unreachable!("`digest_len` says that there are no digests")
    }
    /// Starts to copy the `num_rows` digests that were made last. They can be read until four more are fetched.
    fn fetch_digests(&self, num_rows: usize) -> Result<DigestTicket, Error> {
        let _ = num_rows;
        unreachable!("`digest_len` says that there are no digests")
    }
    /// Waits for digests that were fetched; `out` has one for each row.
    fn read_digests(&self, ticket: DigestTicket, out: &mut [RowDigest]) -> Result<(), Error> {
        let _ = (ticket, out);
        unreachable!("`digest_len` says that there are no digests")
    }
    /// Returns the slots for [`Backend::keep_assumed`].
    fn token_slots(&self) -> TokenSlots {
        TokenSlots::default()
    }
    /// Keeps the tokens that the device assumed for the `num_rows` digests that it made last, 0 for a row where it
    /// assumed none. Steps of every model on the device can take them ([`TokenSource::Kept`]), until the slot is used
    /// again.
    fn keep_assumed(&self, num_rows: usize, slot: usize) -> Result<(), Error> {
        let _ = (num_rows, slot);
        unreachable!("`token_slots` says that there are none")
    }
    /// Replaces the tokens that a slot keeps, for benchmarks that force what is drafted.
    fn replace_kept(&self, slot: usize, tokens: &[u32]) -> Result<(), Error> {
        let _ = (slot, tokens);
        unreachable!("`token_slots` says that there are none")
    }
    /// Starts to copy the tokens of the first `num_slots` slots to the host. The next fetch overwrites them.
    fn fetch_kept(&self, num_slots: usize) -> Result<(), Error> {
        let _ = num_slots;
        unreachable!("`token_slots` says that there are none")
    }
    /// Waits for the tokens that were fetched last, and appends them to `out`: for each slot, its maximum of tokens, of
    /// which those that were kept have a meaning.
    fn read_kept(&self, out: &mut Vec<u32>) -> Result<(), Error> {
        let _ = out;
        unreachable!("`token_slots` says that there are none")
    }

    // Steps.

    /// Runs the operations of one step. `run` calls them in the same order, on the same tensors, for every step with
    /// equal numbers of rows, wanted rows and queries. A backend may therefore record them once and replay them later
    /// without calling `run`.
    fn step(
        &self,
        index: &StepIndex<'_>,
        memo: &mut StepMemo,
        run: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _ = (index, memo);
        run()
    }

    /// Waits until all operations are done, where they are asynchronous.
    fn wait(&self) -> Result<(), Error> {
        Ok(())
    }

    // From ids to rows, and selecting rows.

    /// `out[r] = scale * table[rows[r]]`
    fn embed(&self, table: &Tensor, rows: TableRows<'_>, scale: f32, out: &mut Tensor) -> Result<(), Error>;
    /// `out[r] = x[rows[r]]`
    fn gather_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), Error>;
    /// `out[rows[r]] = x[r]`. No row of `out` is named twice.
    fn scatter_rows(&self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), Error>;

    // Normalisation, residuals, caps.

    /// `out = x / sqrt(mean(x^2) + eps) * weight`, over each group of `weight.len()` values: a row, or a head.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error>;
    /// RMSNorm of each group of `group_len` values, as [`Backend::mamba2`] computes it of its outputs. The weights of
    /// all groups follow each other. Needs [`Extension::SharedMamba2`].
    fn grouped_rms_norm(&self, x: &Tensor, norm: RmsNorm<'_>, group_len: usize, out: &mut Tensor) -> Result<(), Error> {
        let _ = (x, norm, group_len, out);
        unreachable!("`supports` says that ranks cannot share out Mamba-2 layers")
    }
    /// `out = (x - mean) / sqrt(var + eps) * weight + bias`
    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), Error>;
    /// `x += y`
    fn add(&self, y: &Tensor, x: &mut Tensor) -> Result<(), Error>;
    /// `x += y`, then `out` becomes the RMSNorm of x.
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
    /// Computes `W x + b` for each row x, and writes it to `out` or adds it to the residual stream.
    fn linear_to(&self, x: &Tensor, linear: &Linear, out: Output<'_>) -> Result<(), Error> {
        self.linear(x, linear, out.rows())
    }
    /// Computes the rows of an input and returns them.
    fn input<'a>(&self, input: Input<'a>) -> Result<&'a Tensor, Error> {
        match input {
            Input::Rows(x) => Ok(x),
            Input::Normed { x, weight, eps, normed } => {
                self.rms_norm(x, weight, eps, normed)?;
                Ok(normed)
            }
            Input::Joined { residual, weight, eps, normed } => {
                let Residual { hidden, update, pending } = residual;
                match std::mem::take(pending) {
                    Pending::Nothing => self.rms_norm(hidden, weight, eps, normed)?,
                    Pending::Update => self.add_rms_norm(update, hidden, weight, eps, normed)?,
                    Pending::PartialSums(_) => unreachable!("a backend that leaves partial sums overrides this"),
                }
                Ok(normed)
            }
        }
    }
    /// Completes the residual stream: adds its pending update.
    fn join(&self, residual: &mut Residual) -> Result<(), Error> {
        let Residual { hidden, update, pending } = residual;
        match std::mem::take(pending) {
            Pending::Nothing => Ok(()),
            Pending::Update => self.add(update, hidden),
            Pending::PartialSums(_) => unreachable!("a backend that leaves partial sums overrides this"),
        }
    }
    /// Returns how a product with this map rounds its input rows; `None` if it does not round them to 8-bit integers.
    fn input_rounding(&self, linear: &Linear) -> Option<RoundedGroups> {
        let _ = linear;
        None
    }
    /// Applies several maps to the same rows, such as those of queries, keys and values. A device may fuse them.
    fn linears(&self, x: Input<'_>, maps: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
        let x = self.input(x)?;
        maps.iter_mut().try_for_each(|(linear, out)| self.linear(x, linear, out))
    }
    /// The first two maps of a gated MLP: `gate = activation(gate x) * (up x)`. The contents of `up` are unspecified
    /// afterwards.
    fn gated(
        &self,
        x: Input<'_>,
        [(gate, gate_out), (up, up_out)]: [(&Linear, &mut Tensor); 2],
        activation: Activation,
    ) -> Result<(), Error> {
        self.linears(x, &mut [(gate, gate_out), (up, up_out)])?;
        self.gate(activation, up_out, gate_out)
    }
    /// A whole gated MLP on the residual stream: `hidden += down(activation(gate x) * (up x))`, where x is the norm of
    /// `hidden`.
    fn gated_mlp(&self, call: GatedMlpCall<'_>, residual: &mut Residual) -> Result<(), Error> {
        let GatedMlpCall { mlp, activation, norm, normed, gate, up, adds_to_stream } = call;
        let input = match norm {
            Some(RmsNorm { weight, eps }) => Input::Joined { residual: &mut *residual, weight, eps, normed },
            None => Input::Rows(normed),
        };
        self.gated(input, [(&mlp.gate, &mut *gate), (&mlp.up, up)], activation)?;
        let out = if adds_to_stream { Output::Residual(residual) } else { Output::Rows(&mut residual.update) };
        self.linear_to(gate, &mlp.down, out)
    }
    /// `x = activation(x)`
    fn activate(&self, activation: Activation, x: &mut Tensor) -> Result<(), Error>;
    /// `gate = activation(gate) * up`
    fn gate(&self, activation: Activation, up: &Tensor, gate: &mut Tensor) -> Result<(), Error>;
    /// `x *= sigmoid(gate)`. A gate of one column applies to the whole row.
    fn sigmoid_gate(&self, gate: &Tensor, x: &mut Tensor) -> Result<(), Error> {
        let _ = (gate, x);
        unreachable!("`supports` says that there are no sigmoid gates")
    }
    /// `gate = activation(gate) * up`, where `up` are the columns of `inputs` from `first` on. Needs
    /// [`Extension::LayerInputs`].
    fn gate_by_columns(
        &self,
        activation: Activation,
        inputs: &Tensor,
        first: usize,
        gate: &mut Tensor,
    ) -> Result<(), Error> {
        let _ = (activation, inputs, first, gate);
        unreachable!("`supports` says that layers have no inputs of their own")
    }
    /// `x *= factor`. Needs [`Extension::LayerScales`].
    fn scale(&self, factor: f32, x: &mut Tensor) -> Result<(), Error> {
        let _ = (factor, x);
        unreachable!("`supports` says that layers have no factors")
    }
    /// Computes, for each row, the weighted sum of the gated MLPs of its selected experts, added in ascending order.
    fn expert_mlp(&self, experts: ExpertMlp<'_>, out: Output<'_>) -> Result<(), Error>;
    /// The first half of [`Backend::expert_mlp`] if ranks share out its maps: writes `activation(gate x) * (up x)` of
    /// each row's selected experts to a row of `out` each, in ascending order of experts, then of rows. Needs
    /// [`Extension::SharedExperts`].
    fn expert_gates(&self, experts: &ExpertMlp<'_>, out: &mut Tensor) -> Result<(), Error> {
        let _ = (experts, out);
        unreachable!("`supports` says that ranks cannot share out experts")
    }
    /// The second half of [`Backend::expert_mlp`] if ranks share out its maps: the weighted sums of the last maps of
    /// `gated`, which has the rows of [`Backend::expert_gates`]. `out` is as wide as those maps have outputs.
    fn expert_sums(&self, experts: &ExpertMlp<'_>, gated: &Tensor, out: &mut Tensor) -> Result<(), Error> {
        let _ = (experts, gated, out);
        unreachable!("`supports` says that ranks cannot share out experts")
    }
    /// [`Backend::expert_mlp`] for experts without gates. Needs [`Extension::PlainExperts`].
    fn plain_expert_mlp(&self, experts: ExpertMlp<'_, PlainMlp>, out: Output<'_>) -> Result<(), Error> {
        let _ = (experts, out);
        unreachable!("`supports` says that all experts have gates")
    }

    /// [`Backend::expert_gates`] for experts without gates: writes `activation(up x)`.
    fn plain_expert_activations(&self, experts: &ExpertMlp<'_, PlainMlp>, out: &mut Tensor) -> Result<(), Error> {
        let _ = (experts, out);
        unreachable!("`supports` says that ranks cannot share out experts")
    }
    /// [`Backend::expert_sums`] for experts without gates.
    fn plain_expert_sums(
        &self,
        experts: &ExpertMlp<'_, PlainMlp>,
        active: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let _ = (experts, active, out);
        unreachable!("`supports` says that ranks cannot share out experts")
    }

    /// Applies a linear map to each head of each row: `out[r][h] = maps[h] x[r][h]`. Needs
    /// [`Extension::LatentAttention`].
    fn map_heads(&self, x: &Tensor, maps: &[Linear], out: &mut Tensor) -> Result<(), Error> {
        let _ = (x, maps, out);
        unreachable!("`supports` says that there is no latent attention")
    }
    /// Joins two parts of each of `num_heads` heads: `out[r][h] = parts[0][r][h], parts[1][r][h]`. Needs
    /// [`Extension::LatentAttention`].
    fn join_heads(&self, num_heads: usize, parts: [&Tensor; 2], out: &mut Tensor) -> Result<(), Error> {
        let _ = (num_heads, parts, out);
        unreachable!("`supports` says that there is no latent attention")
    }

    // Attention.

    /// Computes `cos` and `sin` of `position * frequency`, times `factor`: one row for each position.
    fn rope_angles(&self, positions: &[u32], frequencies: &[f32], factor: f32, out: &mut Tensor) -> Result<(), Error>;
    /// Rotates the first `2 * frequencies` values of each head of `x` by the row's angles.
    fn rope(&self, rope: Rope<'_>, x: &mut Tensor) -> Result<(), Error>;
    /// Writes each row's key and value into its slot, and rounds each head separately to the format of the blocks. A
    /// value that the format cannot hold becomes a NaN, so that every result that depends on it is a NaN too instead of
    /// silently wrong.
    fn store_kv(&self, store: StoreKv<'_>, kv: &mut KvLayer) -> Result<(), Error>;
    /// Rotates queries and keys by the rows' angles, and stores keys and values.
    fn rotate_and_store(
        &self,
        call: RotateAndStore<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
    ) -> Result<(), Error> {
        let RotateAndStore { rope, values, slots, shape } = call;
        self.rope(rope, queries)?;
        self.rope(rope, keys)?;
        self.store_kv(StoreKv { keys, values, slots, shape }, kv)
    }
    /// Softmax attention of each row over the stored keys and values of its sequence, its own included.
    fn attention(&self, attention: Attention<'_>, out: &mut Tensor) -> Result<(), Error>;
    /// Softmax attention of each row over stored keys and values of its sequence, those of later positions included:
    /// the attention of encoders. All of them are stored before.
    fn bidirectional_attention(&self, call: BidirectionalAttention<'_>, out: &mut Tensor) -> Result<(), Error> {
        let _ = (call, out);
        let reason = "encoders run on the CPU only".into();
        Err(Error::Device { device: self.description(), operation: "bidirectional attention", reason })
    }
    /// Rotates queries and keys if there are angles, stores keys and values, and attends. The contents of `queries` and
    /// `keys` are unspecified afterwards. A block that a sequence stores into belongs to no other sequence of the step,
    /// so that one may read while the other stores.
    fn attend(
        &self,
        attend: Attend<'_>,
        queries: &mut Tensor,
        keys: &mut Tensor,
        kv: &mut KvLayer,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let Attend { rope, values, slots, positions, sequences, block_tables, shape, .. } = attend;
        let Attend { scale, soft_cap, window, sinks, .. } = attend;
        assert!(sinks.is_none(), "a backend with attention sinks overrides this");
        let values = values.rows();
        match rope {
            Some(rope) => self.rotate_and_store(RotateAndStore { rope, values, slots, shape }, queries, keys, kv)?,
            None => self.store_kv(StoreKv { keys, values, slots, shape }, kv)?,
        }
        let attention = Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window };
        self.attention(attention, out)
    }

    // Recurrences.

    /// A gated convolution over the last positions of each channel: `out = gate_out * (bias + sum(taps[i] * x[i]))`,
    /// where x are the products `gate_in * input` of the row and of the rows before it, summed from the oldest to the
    /// row itself. A row of `memory` is a state: the products of the last `taps - 1` positions, the oldest first.
    fn short_convolution(
        &self,
        call: ShortConvolution<'_>,
        memory: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let _ = (call, memory, out);
        unreachable!("`supports` says that there are no short convolutions")
    }
    /// A gated delta net, row after row. Queries, keys and values are convolved over the last positions, and SiLU is
    /// applied; queries and keys are divided by their length. For each value head, with the matrix S of its state:
    ///
    /// ```text
    /// S  = exp(decay * softplus(time_step + time_bias)) * S
    /// S += key (sigmoid(beta) * (value - key^T S))^T
    /// out = rms_norm(query^T S / sqrt(key_size)) * silu(gate)
    /// ```
    ///
    /// A row of `memory` is a state, as [`DeltaNetShape::state_len`] describes it.
    fn delta_net(&self, call: DeltaNet<'_>, memory: &mut Tensor, out: &mut Tensor) -> Result<(), Error> {
        let _ = (call, memory, out);
        unreachable!("`supports` says that there are no delta nets")
    }
    /// A Mamba-2 layer, row after row. The inputs x of the heads, B and C are convolved over the last positions, and
    /// SiLU is applied. For each head, with the matrix S of its state, and B and C of its group:
    ///
    /// ```text
    /// dt = clamp(softplus(time_step + time_bias))
    /// S  = exp(decay * dt) * S + B (dt * x)^T
    /// y  = C^T S + skip * x
    /// out = rms_norm(y * silu(gate)) over each `norm_size` outputs
    /// ```
    ///
    /// Without a norm, `out = y * silu(gate)`.
    ///
    /// A row of `memory` is a state, as [`Mamba2Shape::state_len`] describes it.
    fn mamba2(&self, call: Mamba2<'_>, memory: &mut Tensor, out: &mut Tensor) -> Result<(), Error> {
        let _ = (call, memory, out);
        unreachable!("`supports` says that there are no Mamba-2 layers")
    }
}
