//! The activations of a step, and how norms and residual additions pass from one layer to the next.
//!
//! An addition to the residual stream and the RMSNorm after it are not computed at once: they are handed to the linear
//! maps that read the result ([`Entry`]), because a device may compute all of them in one kernel.

use pellucid_tensor::{Backend, DType, Error as DeviceError, Input, Output, Pending, Residual, RmsNorm, Tensor};

use crate::config::{LatentAttention, NormKind};
use crate::probe::Taps;
use crate::ranks::Ranks;
use crate::rope::RopeFrequencies;
use crate::weights::Norm;
use crate::{Batch, DecoderConfig, Error};

/// The rows of a step between two operations. Kept from step to step, so that a step allocates nothing.
#[derive(Debug)]
pub(crate) struct Activations {
    pub(crate) residual: Residual,
    pub(crate) normed: Tensor,
    pub(crate) attention: BySize<AttentionActivations>,
    pub(crate) latent: Option<LatentActivations>,
    pub(crate) mlp: BySize<MlpActivations>,
    pub(crate) router: Tensor,
    /// Inputs and outputs of a recurrence.
    pub(crate) recurrent_input: Tensor,
    pub(crate) recurrent_output: Tensor,
    /// Gate of the output of a recurrence, and a time step for each of its heads.
    pub(crate) recurrent_gate: Tensor,
    pub(crate) time_step: Tensor,
    /// Strength of writing, for each head of a delta net.
    pub(crate) delta_beta: Tensor,
    /// Gate of the output of attention.
    pub(crate) attention_gate: Tensor,
    /// The outputs of the three maps of the shared expert.
    pub(crate) shared_gate: Tensor,
    pub(crate) shared_up: Tensor,
    pub(crate) shared_output: Tensor,
    /// Input of experts that read a projection, and their output; the output of experts beside a dense MLP.
    pub(crate) expert_input: Tensor,
    pub(crate) expert_output: Tensor,
    pub(crate) layer_inputs: LayerInputActivations,
    /// Gate of the output of the shared expert.
    pub(crate) shared_output_gate: Tensor,
    /// Cosines and sines, for each rotary table.
    pub(crate) angles: Vec<Tensor>,
    /// The wanted rows of the residual stream.
    pub(crate) last: Tensor,
    pub(crate) last_normed: Tensor,
    pub(crate) logits: Tensor,
    /// Present while a probe runs.
    pub(crate) taps: Option<Taps>,
    /// Present if several ranks compute the model.
    pub(crate) ranks: Option<Box<Ranks>>,
}

/// The activations of attention in layers with heads of one size.
#[derive(Debug)]
pub(crate) struct AttentionActivations {
    pub(crate) queries: Tensor,
    pub(crate) keys: Tensor,
    /// Output of the norm of `keys` or `values`, with which it is then swapped.
    pub(crate) spare_keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) attended: Tensor,
}

/// The activations of latent attention, beside those that all attention has.
#[derive(Debug)]
pub(crate) struct LatentActivations {
    /// Low-rank queries, before and after their norm; of one column if queries have one matrix.
    pub(crate) query_ranks: Tensor,
    pub(crate) query_ranks_normed: Tensor,
    /// The parts of the queries, by head.
    pub(crate) plain_queries: Tensor,
    pub(crate) rotary_queries: Tensor,
    pub(crate) rotary_keys: Tensor,
    pub(crate) latents: Tensor,
    pub(crate) latents_normed: Tensor,
    /// Outputs of attention, mapped to the values of each head.
    pub(crate) values: Tensor,
}

/// The activations of dense MLPs of one width.
#[derive(Debug)]
pub(crate) struct MlpActivations {
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
}

/// The inputs that each layer gets in addition, and what is computed from one of them.
#[derive(Debug)]
pub(crate) struct LayerInputActivations {
    /// `[rows][layers * size]`
    pub(crate) inputs: Tensor,
    pub(crate) projected: Tensor,
    pub(crate) projected_normed: Tensor,
    /// `[rows][size]`
    pub(crate) gate: Tensor,
}

/// Activations for each size that layers have.
#[derive(Debug)]
pub(crate) struct BySize<T> {
    sizes: Vec<T>,
    /// For each layer, an index of `sizes`.
    of_layers: Vec<usize>,
}

impl<T> BySize<T> {
    fn new<S: PartialEq>(
        sizes: impl Iterator<Item = S>,
        make: impl Fn(&S) -> Result<T, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let mut known = Vec::new();
        let of_layers = sizes
            .map(|size| {
                known.iter().position(|other| *other == size).unwrap_or_else(|| {
                    known.push(size);
                    known.len() - 1
                })
            })
            .collect();
        Ok(BySize { sizes: known.iter().map(make).collect::<Result<_, _>>()?, of_layers })
    }

    pub(crate) fn of_mut(&mut self, layer: usize) -> &mut T {
        &mut self.sizes[self.of_layers[layer]]
    }
}

impl AttentionActivations {
    fn tensors(&self) -> [&Tensor; 5] {
        [&self.queries, &self.keys, &self.spare_keys, &self.values, &self.attended]
    }

    fn tensors_mut(&mut self) -> [&mut Tensor; 5] {
        [&mut self.queries, &mut self.keys, &mut self.spare_keys, &mut self.values, &mut self.attended]
    }
}

impl LatentActivations {
    fn new(
        config: &DecoderConfig,
        latent: LatentAttention,
        rows: impl Fn(usize) -> Result<Tensor, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let LatentAttention { query_rank, latent_size, rotary_size, plain_size, value_size, .. } = latent;
        Ok(LatentActivations {
            query_ranks: rows(query_rank.unwrap_or(1))?,
            query_ranks_normed: rows(query_rank.unwrap_or(1))?,
            plain_queries: rows(config.num_heads * plain_size)?,
            rotary_queries: rows(config.num_heads * rotary_size)?,
            rotary_keys: rows(rotary_size)?,
            latents: rows(latent_size)?,
            latents_normed: rows(latent_size)?,
            values: rows(config.num_heads * value_size)?,
        })
    }

    fn tensors(&self) -> [&Tensor; 8] {
        [
            &self.query_ranks,
            &self.query_ranks_normed,
            &self.plain_queries,
            &self.rotary_queries,
            &self.rotary_keys,
            &self.latents,
            &self.latents_normed,
            &self.values,
        ]
    }

    fn tensors_mut(&mut self) -> [&mut Tensor; 8] {
        [
            &mut self.query_ranks,
            &mut self.query_ranks_normed,
            &mut self.plain_queries,
            &mut self.rotary_queries,
            &mut self.rotary_keys,
            &mut self.latents,
            &mut self.latents_normed,
            &mut self.values,
        ]
    }
}

impl LayerInputActivations {
    fn tensors(&self) -> [&Tensor; 4] {
        [&self.inputs, &self.projected, &self.projected_normed, &self.gate]
    }

    fn tensors_mut(&mut self) -> [&mut Tensor; 4] {
        [&mut self.inputs, &mut self.projected, &mut self.projected_normed, &mut self.gate]
    }
}

/// Input of attention or of an MLP.
#[derive(Clone, Copy)]
pub(crate) enum Entry<'w> {
    /// The rows of `normed`.
    Normed,
    /// The residual stream itself, which has no pending update.
    Stream,
    /// The RMSNorm of the residual stream, after its pending update is added. The operation that reads the input
    /// computes it.
    Joined(&'w Norm),
}

impl<'w> Entry<'w> {
    pub(crate) fn input<'a>(
        self,
        config: &DecoderConfig,
        residual: &'a mut Residual,
        normed: &'a mut Tensor,
    ) -> Input<'a>
    where
        'w: 'a,
    {
        match (self, self.norm(config)) {
            (_, Some(RmsNorm { weight, eps })) => Input::Joined { residual, weight, eps, normed },
            (Entry::Stream, _) => Input::Rows(&residual.hidden),
            _ => Input::Rows(normed),
        }
    }

    /// Returns the norm that is still to be computed.
    pub(crate) fn norm(self, config: &DecoderConfig) -> Option<RmsNorm<'w>> {
        match self {
            Entry::Normed | Entry::Stream => None,
            Entry::Joined(norm) => Some(RmsNorm { weight: &norm.weight, eps: config.stream_norm_eps() }),
        }
    }
}

/// Returns the output of attention or an MLP: the residual stream, or `update` if `output_norm` is applied first.
pub(crate) fn output<'a>(residual: &'a mut Residual, output_norm: Option<&Norm>) -> Output<'a> {
    match output_norm {
        Some(_) => Output::Rows(&mut residual.update),
        None => Output::Residual(residual),
    }
}

impl Activations {
    pub(crate) fn new(config: &DecoderConfig, backend: &dyn Backend, ropes: &[RopeFrequencies]) -> Result<Self, Error> {
        let dtype = backend.activation_dtype();
        let rows = |cols: usize| backend.zeros(dtype, 0, cols);
        let hidden = config.hidden_size;
        let shared = config.experts.and_then(|experts| experts.shared_mlp_size);
        let attention = |&(queries, keys, attended): &(usize, usize, usize)| {
            Ok(AttentionActivations {
                queries: rows(queries)?,
                keys: rows(keys)?,
                spare_keys: rows(keys)?,
                values: rows(keys)?,
                attended: rows(attended)?,
            })
        };
        let layers = 0..config.num_layers_with_predictor();
        let of_inputs = config.layer_input_size.map_or(1, |size| size * config.num_layers());
        let (recurrent_input, recurrent_output) = config.recurrent_sizes().unwrap_or((1, 1));
        let recurrent_heads = config.recurrent_heads().unwrap_or(1);
        let expert_output = config.expert_input_size.or(config.dense_beside_experts.then_some(hidden)).unwrap_or(1);
        // Angles are f32 because they are computed only once a step, and logits because the host reads them.
        let angles = |rope: &RopeFrequencies| backend.zeros(DType::F32, 0, 2 * rope.frequencies.len());
        Ok(Activations {
            residual: Residual { hidden: rows(hidden)?, update: rows(hidden)?, pending: Pending::Nothing },
            normed: rows(hidden)?,
            attention: BySize::new(
                layers.clone().map(|i| (config.query_size(i), config.key_size(i), config.attended_size(i))),
                attention,
            )?,
            latent: config.latent_attention.map(|latent| LatentActivations::new(config, latent, rows)).transpose()?,
            mlp: BySize::new(layers.map(|layer| config.mlp_size_of(layer)), |&size| {
                Ok(MlpActivations { gate: rows(size)?, up: rows(size)? })
            })?,
            router: rows(config.experts.map_or(1, |experts| experts.num_experts))?,
            recurrent_input: rows(recurrent_input)?,
            recurrent_output: rows(recurrent_output)?,
            recurrent_gate: rows(recurrent_output)?,
            time_step: rows(recurrent_heads)?,
            delta_beta: rows(recurrent_heads)?,
            attention_gate: rows(if config.attention_gate { config.num_heads * config.head_size } else { 1 })?,
            shared_gate: rows(shared.unwrap_or(1))?,
            shared_up: rows(shared.unwrap_or(1))?,
            shared_output: rows(if shared.is_some() || config.dense_beside_experts { hidden } else { 1 })?,
            shared_output_gate: rows(1)?,
            expert_input: rows(config.expert_input_size.unwrap_or(1))?,
            expert_output: rows(expert_output)?,
            layer_inputs: LayerInputActivations {
                inputs: rows(of_inputs)?,
                projected: rows(of_inputs)?,
                projected_normed: rows(of_inputs)?,
                gate: rows(config.layer_input_size.unwrap_or(1))?,
            },
            angles: ropes.iter().map(angles).collect::<Result<_, _>>()?,
            last: rows(hidden)?,
            last_normed: rows(hidden)?,
            logits: backend.zeros(DType::F32, 0, config.vocab_size)?,
            taps: None,
            ranks: None,
        })
    }

    /// Returns the bytes of a step of `num_rows` rows, of which `num_wanted` need logits.
    pub(crate) fn bytes(&self, num_rows: usize, num_wanted: usize) -> u64 {
        let Residual { hidden, update, .. } = &self.residual;
        let rows = [hidden, update, &self.normed, &self.router, &self.recurrent_input, &self.recurrent_output];
        let attention = self.attention.sizes.iter().flat_map(AttentionActivations::tensors);
        let attention = attention.chain(self.latent.iter().flat_map(LatentActivations::tensors));
        let mlp = self.mlp.sizes.iter().flat_map(|mlp| [&mlp.gate, &mlp.up]);
        let more = [&self.shared_gate, &self.shared_up, &self.shared_output, &self.expert_input, &self.expert_output];
        let gates = [&self.attention_gate, &self.shared_output_gate];
        let recurrent = [&self.recurrent_gate, &self.time_step, &self.delta_beta];
        let more = more.into_iter().chain(self.layer_inputs.tensors()).chain(gates).chain(recurrent);
        let wanted = [&self.last, &self.last_normed, &self.logits];
        let bytes_of = |tensor: &Tensor| tensor.dtype().bytes_for(tensor.cols()).unwrap_or(0) as u64;
        let row: u64 = rows.into_iter().chain(attention).chain(mlp).chain(more).chain(&self.angles).map(bytes_of).sum();
        row * num_rows as u64 + wanted.into_iter().map(bytes_of).sum::<u64>() * num_wanted as u64
    }

    /// Gives every tensor the rows of a step. Without `needs_logits`, the logits, the largest rows, keep theirs.
    pub(crate) fn resize(
        &mut self,
        backend: &dyn Backend,
        batch: &Batch,
        needs_logits: bool,
    ) -> Result<(), DeviceError> {
        let tensors = [
            &mut self.residual.hidden,
            &mut self.residual.update,
            &mut self.normed,
            &mut self.router,
            &mut self.recurrent_input,
            &mut self.recurrent_output,
            &mut self.recurrent_gate,
            &mut self.time_step,
            &mut self.delta_beta,
            &mut self.attention_gate,
            &mut self.shared_gate,
            &mut self.shared_up,
            &mut self.shared_output,
            &mut self.expert_input,
            &mut self.expert_output,
            &mut self.shared_output_gate,
        ];
        let attention = self.attention.sizes.iter_mut().flat_map(AttentionActivations::tensors_mut);
        let attention = attention.chain(self.latent.iter_mut().flat_map(LatentActivations::tensors_mut));
        let mlp = self.mlp.sizes.iter_mut().flat_map(|mlp| [&mut mlp.gate, &mut mlp.up]);
        let more = attention.chain(mlp).chain(self.layer_inputs.tensors_mut());
        for tensor in tensors.into_iter().chain(more).chain(&mut self.angles) {
            backend.resize_rows(tensor, batch.num_rows())?;
        }
        let logits = needs_logits.then_some(&mut self.logits);
        for tensor in [&mut self.last, &mut self.last_normed].into_iter().chain(logits) {
            backend.resize_rows(tensor, batch.num_wanted())?;
        }
        Ok(())
    }

    /// Computes `hidden += output_norm(update)` and prepares `next_norm(hidden)`. Without an output norm, the addition
    /// is left to the operation that reads the residual stream.
    pub(crate) fn join<'w>(
        &mut self,
        backend: &dyn Backend,
        config: &DecoderConfig,
        output_norm: Option<&Norm>,
        next_norm: Option<&'w Norm>,
    ) -> Result<Entry<'w>, DeviceError> {
        if let Some(norm) = output_norm {
            apply_norm(backend, (config.norm, config.norm_eps), norm, &self.residual.update, &mut self.normed)?;
            backend.add(&self.normed, &mut self.residual.hidden)?;
        }
        self.enter(backend, config, next_norm)
    }

    /// Prepares `next_norm(hidden)`, or `hidden` if there is no norm. An RMSNorm is computed by the linear maps that
    /// read it.
    pub(crate) fn enter<'w>(
        &mut self,
        backend: &dyn Backend,
        config: &DecoderConfig,
        next_norm: Option<&'w Norm>,
    ) -> Result<Entry<'w>, DeviceError> {
        match next_norm {
            Some(next) if config.norm == NormKind::Rms => return Ok(Entry::Joined(next)),
            Some(next) => {
                backend.join(&mut self.residual)?;
                apply_norm(
                    backend,
                    (config.norm, config.stream_norm_eps()),
                    next,
                    &self.residual.hidden,
                    &mut self.normed,
                )?;
            }
            None => {
                backend.join(&mut self.residual)?;
                return Ok(Entry::Stream);
            }
        }
        Ok(Entry::Normed)
    }
}

fn apply_norm(
    backend: &dyn Backend,
    (kind, eps): (NormKind, f32),
    norm: &Norm,
    x: &Tensor,
    out: &mut Tensor,
) -> Result<(), DeviceError> {
    match (kind, &norm.bias) {
        (NormKind::Layer, Some(bias)) => backend.layer_norm(x, &norm.weight, bias, eps, out),
        _ => backend.rms_norm(x, &norm.weight, eps, out),
    }
}

/// Returns the norm of x, rows of the residual stream, as the input of linear maps, which compute an RMSNorm
/// themselves.
pub(crate) fn normed<'a>(
    backend: &dyn Backend,
    config: &DecoderConfig,
    norm: &'a Norm,
    x: &'a Tensor,
    out: &'a mut Tensor,
) -> Result<Input<'a>, DeviceError> {
    if config.norm == NormKind::Rms {
        return Ok(Input::Normed { x, weight: &norm.weight, eps: config.stream_norm_eps(), normed: out });
    }
    apply_norm(backend, (config.norm, config.stream_norm_eps()), norm, x, out)?;
    Ok(Input::Rows(out))
}
