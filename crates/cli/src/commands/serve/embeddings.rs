//! The model of a server that computes vectors.

use std::path::Path;

use anyhow::Result;
use pellucid::LoadedEmbeddings;
use pellucid_checkpoint::Checkpoint;
use pellucid_generate::{Guards, LoadedEmbedder};
use pellucid_server::ServedModel;
use tracing::info;

use super::{ServeArgs, fingerprint};
use crate::flags::usage_error::bail_usage;
use crate::hub::Hub;
use crate::terminal::format::bytes_text;

/// Whether `--model` computes vectors: it is an encoder, its files state a pooling, or `--pooling` is given.
pub(super) fn is_embedding_model(args: &ServeArgs, path: &Path) -> Result<bool> {
    if args.pooling.pooling.is_some() && args.embedding_model.is_none() {
        return Ok(true);
    }
    let checkpoint = Checkpoint::open(path)?;
    Ok(pellucid_model::is_encoder(&checkpoint)? || pellucid_model::stated_pooling(&checkpoint)?.is_some())
}

/// Refuses flags that have no effect on a server that generates no text.
pub(super) fn refuse_flags_for_text(args: &ServeArgs, template: Option<&str>, guards: &Guards) -> Result<()> {
    if args.embedding_model.is_some() {
        bail_usage!("--embedding-model: the model of --model computes vectors already");
    }
    let given = [
        ("--chat-template", template.is_some()),
        ("--shared-system", args.shared_system.is_some()),
        ("--guard-patterns, --guard-model, --guard-url", !guards.is_empty()),
    ];
    if let Some((flag, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
        bail_usage!("{flag} has no effect, because the model computes vectors and generates no text");
    }
    Ok(())
}

/// Opens the model of `--model`.
pub(super) fn load(
    args: &ServeArgs,
    names: (String, Vec<String>),
    path: &Path,
    hub: &Hub,
) -> Result<(ServedModel, String)> {
    let builder = args.compute.builder(path, hub)?.max_waiting(args.max_waiting);
    finish(args, names, path, args.compute.load_embeddings(builder, args.pooling.pooling)?)
}

/// Opens the model of `--embedding-model`.
pub(super) fn load_second(args: &ServeArgs, name: &str, hub: &Hub) -> Result<ServedModel> {
    let path = hub.resolve(Some(name))?;
    let names = (fingerprint::model_name(Some(name), &path), Vec::new());
    let loaded = args.compute.load_second(&path, args.pooling.pooling, args.max_waiting, hub)?;
    Ok(finish(args, names, &path, loaded)?.0)
}

/// Names a model, and logs what it is. Returns it with its device in words.
fn finish(
    args: &ServeArgs,
    (id, aliases): (String, Vec<String>),
    path: &Path,
    loaded: LoadedEmbeddings,
) -> Result<(ServedModel, String)> {
    let context_len = loaded.model.info().context_len;
    let fingerprint =
        fingerprint::fingerprint(path, &loaded.files, context_len, &loaded.device, &args.compute, [None; 2])?;
    let model = LoadedEmbedder { id, aliases, fingerprint, ..loaded.model };
    log(&model, &loaded.device, loaded.weight_bytes);
    let device = loaded.device;
    Ok((ServedModel { memory_bytes: loaded.weight_bytes, device: device.clone(), ..model.into() }, device))
}

/// Logs what a loaded model is.
pub(super) fn log(model: &LoadedEmbedder, device: &str, weight_bytes: u64) {
    let info = model.info();
    info!(
        model = model.id,
        aliases = (!model.aliases.is_empty()).then(|| model.aliases.join(", ")),
        fingerprint = model.fingerprint,
        context = info.context_len,
        dimensions = info.num_dimensions,
        pooling = info.pooling.name(),
        device,
        "loaded a model that computes vectors; its weights take {}",
        bytes_text(weight_bytes)
    );
}
