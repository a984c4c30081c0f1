//! `pellucid inspect`: the hyperparameters, memory and tensors of a model, and the tokens of a text.

mod hyperparameters;
mod report;
mod text;

use crate::hub::Hub;
use crate::terminal::format::grouped;
use crate::terminal::output::Output;
use crate::terminal::token_table;
use anyhow::Result;
use pellucid::KvType;
use pellucid_checkpoint::Checkpoint;
use pellucid_tokenizer::Tokenizer;
use report::Report;
use std::io::Write;

/// Show a model's hyperparameters and memory, and the tokens of a text
///
/// With TEXT, its tokens follow, one on each line: id, piece, bytes.
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArgs {
    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    model: String,

    /// Text to show token by token
    text: Option<String>,

    /// Tokens of a sequence, for the size of the KV memory
    /// [default: the maximum that the model supports]
    #[arg(long, verbatim_doc_comment, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    context: Option<u64>,

    /// Number of sequences, for the size of the KV memory
    #[arg(long, value_name = "SEQUENCES", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,

    /// Format of the KV memory: f32, f16, bf16 or q8_0
    #[arg(long, value_name = "TYPE", default_value_t)]
    kv_type: KvType,

    /// List every tensor with its type, shape and bytes
    #[arg(long)]
    tensors: bool,

    /// Print one JSON object, sizes in bytes
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &InspectArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let path = hub.resolve(Some(&args.model))?;
    let checkpoint = Checkpoint::open(&path)?;
    let report = Report::gather(&checkpoint, args)?;
    // A model without a readable tokenizer can be inspected, unless there is a text to encode.
    let tokenizer = match (Tokenizer::from_checkpoint(&checkpoint), &args.text) {
        (Ok(tokenizer), _) => Some(tokenizer),
        (Err(error), Some(_)) => return Err(error.into()),
        (Err(_), None) => None,
    };
    let tokens = match (&tokenizer, &args.text) {
        (Some(tokenizer), Some(text)) => Some((tokenizer, tokenizer.encode(text))),
        _ => None,
    };
    if args.json {
        let mut json = report.to_json(tokenizer.as_ref(), args.tensors);
        if let Some((tokenizer, ids)) = &tokens {
            json["tokens"] = token_table::to_json(tokenizer, ids)?;
        }
        return Ok(output.write_json(&json)?);
    }
    text::write_report(&report, tokenizer.as_ref(), output)?;
    if args.tensors {
        text::write_tensors(&checkpoint, output)?;
    }
    if let Some((tokenizer, ids)) = &tokens {
        writeln!(output, "\n{} tokens", grouped(ids.len() as u64))?;
        token_table::write_table(tokenizer, ids, output)?;
    }
    Ok(())
}
