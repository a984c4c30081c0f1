//! Probes a token that was just sampled: computes its position again, outside the batch, before the token joins the
//! sequence and the blocks of the sequence may be given back.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pellucid_model::{Batch, Chunk, ChunkIds, ChunkState, KvMemory, Model};
use pellucid_sampling::{Logprobs, Workspace};

use super::super::run::internal_error;
use crate::sequence_group::SequenceGroup;
use crate::{AttentionMap, Error, Event, Probe};

/// Runs the request's probe if the token that was sampled for sequence `i` is the one to probe, and sends the result.
pub(super) fn probe_token(
    group: &mut SequenceGroup,
    (i, id): (usize, u32),
    (model, kv): (&mut dyn Model, &mut KvMemory),
    workspace: &mut Workspace,
) -> Result<(), Error> {
    let sequence = &group.sequences[i];
    let num_output = sequence.tokens.len() - group.request.prompt.len();
    let Some(request) = group.request.probe.filter(|probe| probe.token == num_output) else { return Ok(()) };
    let tokens = &sequence.tokens;
    let num_rows = request.num_rows().min(tokens.len());
    let first_position = tokens.len() - num_rows;
    let table = sequence.table.as_ref().expect("a running sequence has blocks");
    let mut batch = Batch::default();
    let chunk = Chunk {
        ids: ChunkIds::Tokens(&tokens[first_position..]),
        first_position,
        blocks: table.blocks(),
        wanted: num_rows - 1..num_rows,
        queries: &[],
        // A model with states is not probed.
        state: ChunkState::default(),
    };
    batch.push_with_windows(chunk, table.window_blocks(), kv.block_len());
    let mut layers: Vec<Result<Logprobs, pellucid_sampling::Error>> = Vec::new();
    let mut on_layer = |row: &[f32]| layers.push(Logprobs::of(row, id, request.layers.unwrap_or_default(), workspace));
    let run = || model.probe(&batch, kv, &request.query(), &mut on_layer);
    let weights = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| internal_error(&panic))??;
    let probe = Probe {
        token: num_output,
        position: tokens.len() - 1,
        id,
        num_layers: model.config().num_layers(),
        num_heads: model.config().num_heads,
        layers: layers.into_iter().collect::<Result<_, _>>()?,
        attention: weights.zip(request.attention).map(|(found, of)| AttentionMap {
            of,
            ids: tokens.clone(),
            weights: found.weights,
        }),
    };
    group.sink.hold(Event::Probed(Box::new(probe)));
    Ok(())
}
