//! The MLP of one layer: gated, ungated, a mixture of experts, or a gated one beside experts.

use pellucid_tensor::{Backend, Error, ExpertMlp, GatedMlp, GatedMlpCall, Input, Output, PlainMlp, Residual, Tensor};

use crate::DecoderConfig;
use crate::activations::{Activations, Entry, output};
use crate::ranks::{Columns, Ranks, project};
use crate::weights::{DenseAndExperts, DenseMlp, ExpertWeights, Mixture, MlpWeights, Norm};

/// Runs the MLP of layer `index`. Writes its result to the residual stream, or to `update` if an output norm follows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    (index, weights): (usize, &MlpWeights),
    (entry, output_norm): (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    let rows = a.mlp.of_mut(index);
    match weights {
        // In two parts, because no norm is computed first, or because rows are gathered in between.
        MlpWeights::Gated(mlp) if matches!(entry, Entry::Stream) || a.ranks.is_some() => {
            let input = entry.input(config, &mut a.residual, &mut a.normed);
            let maps = [(&mlp.gate, &mut rows.gate), (&mlp.up, &mut rows.up)];
            backend.gated(input, maps, config.activation)?;
            let gated = (&rows.gate, Columns::Mlp(index));
            project(backend, a.ranks.as_deref_mut(), gated, &mlp.down, output(&mut a.residual, output_norm))
        }
        MlpWeights::Gated(mlp) => {
            let call = GatedMlpCall {
                mlp,
                activation: config.activation,
                norm: entry.norm(config),
                normed: &mut a.normed,
                gate: &mut rows.gate,
                up: &mut rows.up,
                adds_to_stream: output_norm.is_none(),
            };
            backend.gated_mlp(call, &mut a.residual)
        }
        MlpWeights::Plain(PlainMlp { up, down }) => {
            let input = entry.input(config, &mut a.residual, &mut a.normed);
            backend.linears(input, &mut [(up, &mut rows.up)])?;
            backend.activate(config.activation, &mut rows.up)?;
            let active = (&rows.up, Columns::Mlp(index));
            project(backend, a.ranks.as_deref_mut(), active, down, output(&mut a.residual, output_norm))
        }
        MlpWeights::Experts(weights) => mixture(backend, config, weights, (entry, output_norm), a),
        MlpWeights::DenseAndExperts(both) => dense_and_experts(backend, config, (index, both), entry, a),
    }
}

/// Writes the sum of the selected experts, and of the one that every token uses.
fn mixture(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &Mixture,
    (entry, output_norm): (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    let input = entry.input(config, &mut a.residual, &mut a.normed);
    backend.linears(input, &mut [(&weights.router, &mut a.router)])?;
    let Some(shared) = &weights.shared else {
        return selected_experts(backend, config, weights, a, |residual| output(residual, output_norm));
    };
    selected_experts(backend, config, weights, a, |residual| Output::Rows(&mut residual.update))?;
    match &shared.mlp {
        DenseMlp::Gated(GatedMlp { gate, up, down }) => {
            let maps = [(gate, &mut a.shared_gate), (up, &mut a.shared_up)];
            backend.gated(Input::Rows(&a.normed), maps, config.activation)?;
            let gated = (&a.shared_gate, Columns::SharedExpert);
            project(backend, a.ranks.as_deref_mut(), gated, down, Output::Rows(&mut a.shared_output))?;
        }
        DenseMlp::Plain(PlainMlp { up, down }) => {
            backend.linear(&a.normed, up, &mut a.shared_up)?;
            backend.activate(config.activation, &mut a.shared_up)?;
            let active = (&a.shared_up, Columns::SharedExpert);
            project(backend, a.ranks.as_deref_mut(), active, down, Output::Rows(&mut a.shared_output))?;
        }
    }
    if let Some(gate) = &shared.gate {
        backend.linear(&a.normed, gate, &mut a.shared_output_gate)?;
        backend.sigmoid_gate(&a.shared_output_gate, &mut a.shared_output)?;
    }
    // Marks the update as pending, unless a norm reads it first.
    backend.add(&a.shared_output, output(&mut a.residual, output_norm).rows())
}

/// Writes the weighted sum of the experts that the router's logits select to a part of the residual stream.
fn selected_experts(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &Mixture,
    a: &mut Activations,
    out: impl FnOnce(&mut Residual) -> Output<'_>,
) -> Result<(), Error> {
    let Some([before, after]) = &weights.projections else {
        let ranks = a.ranks.as_deref_mut();
        return sum_experts(backend, config, (weights, ranks), [&a.normed, &a.router], out(&mut a.residual));
    };
    backend.linear(&a.normed, before, &mut a.expert_input)?;
    let sum = Output::Rows(&mut a.expert_output);
    sum_experts(backend, config, (weights, a.ranks.as_deref_mut()), [&a.expert_input, &a.router], sum)?;
    let out = out(&mut a.residual);
    match a.ranks.as_deref_mut() {
        None => backend.linear_to(&a.expert_output, after, out),
        Some(ranks) => ranks.linear(backend, Input::Rows(&a.expert_output), (after, Columns::Hidden), out.rows()),
    }
}

fn sum_experts(
    backend: &dyn Backend,
    config: &DecoderConfig,
    (weights, ranks): (&Mixture, Option<&mut Ranks>),
    [x, router_logits]: [&Tensor; 2],
    out: Output<'_>,
) -> Result<(), Error> {
    let routing = config.experts.expect("checked with the configuration").routing;
    let (score_bias, expert_scales, activation) = (weights.score_bias.as_ref(), None, config.activation);
    match &weights.experts {
        ExpertWeights::Gated(experts) => {
            let call = ExpertMlp { x, router_logits, routing, score_bias, expert_scales, experts, activation };
            match ranks {
                None => backend.expert_mlp(call, out),
                Some(ranks) => ranks.expert_mlp(backend, &call, out),
            }
        }
        ExpertWeights::Plain(experts) => {
            let call = ExpertMlp { x, router_logits, routing, score_bias, expert_scales, experts, activation };
            match ranks {
                None => backend.plain_expert_mlp(call, out),
                Some(ranks) => ranks.plain_expert_mlp(backend, &call, out),
            }
        }
    }
}

/// Writes the sum of a dense MLP and of experts, each normalised, to `update`.
fn dense_and_experts(
    backend: &dyn Backend,
    config: &DecoderConfig,
    (index, weights): (usize, &DenseAndExperts),
    entry: Entry<'_>,
    a: &mut Activations,
) -> Result<(), Error> {
    let (rows, mlp) = (a.mlp.of_mut(index), &weights.dense);
    if a.ranks.is_some() {
        let input = entry.input(config, &mut a.residual, &mut a.normed);
        backend.gated(input, [(&mlp.gate, &mut rows.gate), (&mlp.up, &mut rows.up)], config.activation)?;
        let gated = (&rows.gate, Columns::Mlp(index));
        project(backend, a.ranks.as_deref_mut(), gated, &mlp.down, Output::Rows(&mut a.residual.update))?;
    } else {
        let call = GatedMlpCall {
            mlp,
            activation: config.activation,
            norm: entry.norm(config),
            normed: &mut a.normed,
            gate: &mut rows.gate,
            up: &mut rows.up,
            adds_to_stream: false,
        };
        backend.gated_mlp(call, &mut a.residual)?;
    }
    let eps = config.norm_eps;
    backend.rms_norm(&a.residual.update, &weights.dense_output_norm.weight, eps, &mut a.shared_output)?;

    let (x, weight) = (&a.residual.hidden, &weights.router_norm.weight);
    let input = Input::Normed { x, weight, eps, normed: &mut a.normed };
    backend.linears(input, &mut [(&weights.router, &mut a.router)])?;
    backend.rms_norm(&a.residual.hidden, &weights.expert_norm.weight, eps, &mut a.normed)?;
    let mlp = ExpertMlp {
        x: &a.normed,
        router_logits: &a.router,
        routing: config.experts.expect("checked with the configuration").routing,
        score_bias: None,
        expert_scales: Some(&weights.expert_scales),
        experts: &weights.experts,
        activation: config.activation,
    };
    let out = Output::Rows(&mut a.expert_output);
    match a.ranks.as_deref_mut() {
        None => backend.expert_mlp(mlp, out)?,
        Some(ranks) => ranks.expert_mlp(backend, &mlp, out)?,
    }
    let update = &mut a.residual.update;
    backend.rms_norm(&a.expert_output, &weights.expert_output_norm.weight, eps, update)?;
    backend.add(&a.shared_output, update)
}
