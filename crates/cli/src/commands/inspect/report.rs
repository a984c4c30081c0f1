//! The report of `inspect`, before it becomes text or JSON.

use super::InspectArgs;
use super::hyperparameters::Hyperparameters;
use crate::flags::usage_error::bail_usage;
use crate::terminal::token_table;
use anyhow::Result;
use pellucid_checkpoint::Checkpoint;
use pellucid_model::{EncoderConfig, Error, is_encoder, read_encoder_config};
use pellucid_tensor::DType;
use pellucid_tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The report.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) architecture: String,
    pub(super) numbers: Hyperparameters,
    pub(super) num_parameters: u64,
    /// By format, and by the scheme by which a folder encodes it.
    pub(super) types: BTreeMap<(DType, Option<&'a str>), TypeTotal>,
    pub(super) kv: Option<KvMemory>,
    /// The results of a model that generates no text.
    pub(super) computes: Option<String>,
    /// Reason why the model cannot be run.
    pub(super) cannot_run: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct TypeTotal {
    pub(super) tensors: u64,
    pub(super) parameters: u64,
    pub(super) bytes: u64,
}

/// Size of the KV memory in bytes.
#[derive(Debug)]
pub(super) struct KvMemory {
    pub(super) dtype: DType,
    pub(super) per_token: u64,
    /// `None` if neither the model nor the user gives a context length.
    pub(super) total: Option<KvTotal>,
}

/// Bytes of keys and values of `batch` sequences of `context_tokens` each.
#[derive(Debug)]
pub(super) struct KvTotal {
    pub(super) context_tokens: u64,
    pub(super) batch: u64,
    pub(super) bytes: u64,
    /// Bytes if layers with windows keep the positions within them alone, which they do on the CPU.
    pub(super) within_windows: Option<u64>,
}

impl<'a> Report<'a> {
    pub(super) fn gather(checkpoint: &'a Checkpoint, args: &InspectArgs) -> Result<Report<'a>> {
        let numbers = Hyperparameters::read(checkpoint)?;
        let mut types: BTreeMap<(DType, Option<&str>), TypeTotal> = BTreeMap::new();
        for tensor in checkpoint.tensors() {
            let total = types.entry((tensor.dtype, tensor.encoding())).or_default();
            total.tensors += 1;
            total.parameters += tensor.num_elements() as u64;
            total.bytes += tensor.num_bytes() as u64;
        }
        // Encoders keep nothing between texts, so they have no KV memory.
        let encoder = is_encoder(checkpoint).unwrap_or(false).then(|| read_encoder_config(checkpoint));
        let kv = if encoder.is_some() { None } else { KvMemory::of(&numbers, args)? };
        let error = match &encoder {
            Some(Ok(_)) => None,
            Some(Err(error)) => Some(error.to_string()),
            None => pellucid_model::read_config(checkpoint).err().map(|error| match error {
                // The full messages list all supported architectures or tensors, which is too long here.
                Error::UnsupportedArchitecture { .. } => "its architecture is not supported".into(),
                Error::NoWeights => "it holds a vocabulary and no weights".into(),
                other => other.to_string(),
            }),
        };
        Ok(Report {
            checkpoint,
            architecture: checkpoint.architecture()?.to_owned(),
            num_parameters: types.values().map(|total| total.parameters).sum(),
            numbers,
            types,
            kv,
            computes: encoder.and_then(Result::ok).map(|config| computed_text(&config)),
            cannot_run: error,
        })
    }

    pub(super) fn to_json(&self, tokenizer: Option<&Tokenizer>, with_tensors: bool) -> Value {
        let numbers = &self.numbers;
        let type_json = |((dtype, encoding), total): (&(DType, Option<&str>), &TypeTotal)| {
            let TypeTotal { tensors, parameters, bytes, .. } = total;
            let mut total = json!({
                "type": dtype.name(), "tensors": tensors, "parameters": parameters, "bytes": bytes
            });
            if let Some(encoding) = encoding {
                total["encoding"] = json!(encoding);
            }
            total
        };
        let types: Vec<_> = self.types.iter().map(type_json).collect();
        let special_json = |(purpose, id): &(&str, u64)| {
            let text = tokenizer.and_then(|tokenizer| token_table::text(tokenizer, *id));
            json!({ "for": purpose, "id": id, "piece": text })
        };
        let special: Vec<_> = numbers.special_ids.iter().map(special_json).collect();
        let mut report = json!({
            "name": numbers.name,
            "architecture": self.architecture,
            "computes": self.computes,
            "cannot_run": self.cannot_run,
            "parameters": self.num_parameters,
            "file_bytes": self.checkpoint.file_bytes(),
            "files": self.checkpoint.files(),
            "context_tokens": numbers.context_tokens,
            "vocabulary": numbers.vocabulary,
            "layers": numbers.num_layers,
            "layer_kinds": numbers.layer_kinds.iter()
                .map(|(name, count)| json!({ "kind": name, "layers": count }))
                .collect::<Vec<_>>(),
            "state_bytes": numbers.state_bytes,
            "latent_attention": numbers.latent_attention.map(|latent| json!({
                "row_size": latent.row_size(),
                "rotary_size": latent.rotary_size,
                "key_size": latent.key_size(),
                "value_size": latent.value_size,
            })),
            "width": numbers.width,
            "heads": numbers.num_heads,
            "kv_heads": single(&numbers.kv_heads).map_or_else(|| json!(numbers.kv_heads), |heads| json!(heads)),
            "key_size": numbers.key_size,
            "value_size": numbers.value_size,
            "experts": numbers.num_experts,
            "chat_template": self.checkpoint.chat_template().is_some(),
            "special_ids": special,
            "prepended_ids": tokenizer.map(Tokenizer::prefix),
            "tensor_types": types,
            "notes": self.checkpoint.notes(),
            "kv_memory": self.kv.as_ref().map(|kv| json!({
                "type": kv.dtype.name(),
                "bytes_per_token": kv.per_token,
                "context_tokens": kv.total.as_ref().map(|total| total.context_tokens),
                "batch": kv.total.as_ref().map(|total| total.batch),
                "bytes": kv.total.as_ref().map(|total| total.bytes),
                "windows": numbers.windows.map(|windows| json!({
                    "layers": windows.num_layers,
                    "tokens": windows.num_tokens,
                    "bytes_on_cpu": kv.total.as_ref().and_then(|total| total.within_windows),
                })),
            })),
        });
        if with_tensors {
            report["tensors"] = self
                .checkpoint
                .tensors()
                .iter()
                .map(|tensor| {
                    json!({
                        "name": tensor.name,
                        "type": tensor.dtype.name(),
                        "encoding": tensor.encoding(),
                        "shape": tensor.shape,
                        "bytes": tensor.num_bytes(),
                    })
                })
                .collect();
        }
        report
    }
}

/// Says what an encoder computes.
fn computed_text(config: &EncoderConfig) -> String {
    if config.classifier.is_some() {
        return "scores of pairs of texts".into();
    }
    let pooling = config.pooling.map_or_else(String::new, |pooling| format!(", pooling {}", pooling.name()));
    format!("vectors of {} values{pooling}", config.hidden_size)
}

impl KvMemory {
    /// Returns `None` for a file without attention hyperparameters.
    fn of(numbers: &Hyperparameters, args: &InspectArgs) -> Result<Option<KvMemory>> {
        let dtype = args.kv_type.dtype();
        let Some(per_token) = numbers.kv_bytes_per_token(dtype)? else { return Ok(None) };
        let windowed = numbers.windowed_bytes_per_token(dtype)?;
        let total = |context_tokens: u64| {
            let bytes = per_token.checked_mul(context_tokens).and_then(|bytes| bytes.checked_mul(args.batch));
            let Some(bytes) = bytes else {
                bail_usage!("--context and --batch: the KV memory for them is more than 2^64 bytes");
            };
            // Less than `bytes`, so that nothing overflows.
            let within_windows = numbers.windows.zip(windowed).map(|(windows, windowed)| {
                bytes - windowed * context_tokens.saturating_sub(windows.num_tokens) * args.batch
            });
            Ok(KvTotal { context_tokens, batch: args.batch, bytes, within_windows })
        };
        let total = args.context.or(numbers.context_tokens).map(total).transpose()?;
        Ok(Some(KvMemory { dtype, per_token, total }))
    }
}

/// Returns the value that all entries share, if they do.
pub(super) fn single(values: &[u64]) -> Option<u64> {
    let first = *values.first()?;
    values.iter().all(|value| *value == first).then_some(first)
}
