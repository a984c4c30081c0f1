//! The activations of a step, and how norms and residual additions pass from one layer to the next.
//!
//! An addition to the residual stream and the RMSNorm after it are not computed at once: they are handed to the linear
//! maps that read the result ([`Entry`]), because a device may compute all of them in one kernel.

use pellucid_tensor::{Backend, DType, Error as DeviceError, Input, Output, Pending, Residual, RmsNorm, Tensor};

use crate::config::NormKind;
use crate::rope::RopeFrequencies;
use crate::weights::Norm;
use crate::{Batch, DecoderConfig, Error};

/// The rows of a step between two operations. Kept from step to step, so that a step allocates nothing.
#[derive(Debug)]
pub(crate) struct Activations {
    pub(crate) residual: Residual,
    pub(crate) normed: Tensor,
    pub(crate) queries: Tensor,
    pub(crate) keys: Tensor,
    /// Output of the norm of `keys`, with which it is then swapped.
    pub(crate) spare_keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) attended: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) router: Tensor,
    /// The outputs of the three maps of the shared expert.
    pub(crate) shared_gate: Tensor,
    pub(crate) shared_up: Tensor,
    pub(crate) shared_output: Tensor,
    /// Cosines and sines, for each rotary table.
    pub(crate) angles: Vec<Tensor>,
    /// The wanted rows of the residual stream.
    pub(crate) last: Tensor,
    pub(crate) last_normed: Tensor,
    pub(crate) logits: Tensor,
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
        // Angles are f32 because they are computed only once a step, and logits because the host reads them.
        let angles = |rope: &RopeFrequencies| backend.zeros(DType::F32, 0, 2 * rope.frequencies.len());
        Ok(Activations {
            residual: Residual { hidden: rows(hidden)?, update: rows(hidden)?, pending: Pending::Nothing },
            normed: rows(hidden)?,
            queries: rows(config.query_size())?,
            keys: rows(config.key_size())?,
            spare_keys: rows(config.key_size())?,
            values: rows(config.key_size())?,
            attended: rows(config.query_size())?,
            gate: rows(config.mlp_size)?,
            up: rows(config.mlp_size)?,
            router: rows(config.experts.map_or(1, |experts| experts.num_experts))?,
            shared_gate: rows(shared.unwrap_or(1))?,
            shared_up: rows(shared.unwrap_or(1))?,
            shared_output: rows(shared.map_or(1, |_| hidden))?,
            angles: ropes.iter().map(angles).collect::<Result<_, _>>()?,
            last: rows(hidden)?,
            last_normed: rows(hidden)?,
            logits: backend.zeros(DType::F32, 0, config.vocab_size)?,
        })
    }

    /// Returns the bytes of a step of `num_rows` rows, of which `num_wanted` need logits.
    pub(crate) fn bytes(&self, num_rows: usize, num_wanted: usize) -> u64 {
        let Residual { hidden, update, .. } = &self.residual;
        let rows = [hidden, update, &self.normed, &self.queries, &self.keys, &self.spare_keys, &self.values];
        let more = [&self.attended, &self.gate, &self.up, &self.router];
        let shared = [&self.shared_gate, &self.shared_up, &self.shared_output];
        let wanted = [&self.last, &self.last_normed, &self.logits];
        let bytes_of = |tensor: &Tensor| tensor.dtype().bytes_for(tensor.cols()).unwrap_or(0) as u64;
        let row: u64 = rows.into_iter().chain(more).chain(shared).chain(&self.angles).map(bytes_of).sum();
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
            &mut self.queries,
            &mut self.keys,
            &mut self.spare_keys,
            &mut self.values,
            &mut self.attended,
            &mut self.gate,
            &mut self.up,
            &mut self.router,
            &mut self.shared_gate,
            &mut self.shared_up,
            &mut self.shared_output,
        ];
        for tensor in tensors.into_iter().chain(&mut self.angles) {
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
