//! `pellucid embed`: prints vectors of texts, for scripts and for comparing models.

use std::io::{BufRead, Write};

use anyhow::{Context, Result};
use pellucid::Pooling;
use pellucid_engine::{EmbeddingInput, TenantId};
use pellucid_generate::{LoadedEmbedder, finished_vector};
use serde_json::json;

use crate::flags::compute::ComputeArgs;
use crate::flags::text_file;
use crate::flags::usage_error::{UsageError, bail_usage};
use crate::hub::Hub;
use crate::terminal::output::Output;

/// Texts that are computed before their vectors are printed.
const TEXTS_AT_ONCE: usize = 256;

/// Print the vectors (embeddings) of texts
///
/// The model is an encoder (bert, nomic-bert, modern-bert) or a decoder that
/// was trained to compute vectors. Without texts, each line of standard input
/// is one. A vector is printed as a line of numbers and has the length 1.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct EmbedArgs {
    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    model: String,

    /// Texts; without one, the lines of standard input
    texts: Vec<String>,

    /// Print a JSON object for each text: index, tokens, embedding
    #[arg(long)]
    json: bool,

    /// Print the first N values only, if the model was trained for it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    dimensions: Option<u32>,

    /// Do not divide a vector by its length
    #[arg(long)]
    no_normalize: bool,

    /// Cut texts that are longer than the model's context
    /// [default: they are an error]
    #[arg(long, verbatim_doc_comment)]
    truncate: bool,

    #[command(flatten)]
    pooling: PoolingArgs,

    #[command(flatten)]
    compute: ComputeArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PoolingArgs {
    /// How the rows of a text become a vector: mean, cls or last
    /// [default: as the model's files state it]
    #[arg(long, verbatim_doc_comment, value_name = "KIND", value_parser = parse_pooling)]
    pub(crate) pooling: Option<Pooling>,
}

fn parse_pooling(text: &str) -> Result<Pooling, String> {
    Pooling::named(text).ok_or_else(|| format!("expected {}", Pooling::ALL.map(Pooling::name).join(", ")))
}

pub(crate) fn run(args: &EmbedArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let path = hub.resolve(Some(&args.model))?;
    let model = args.compute.open_embeddings(&path, args.pooling.pooling, hub)?.model;
    if model.info().scores_pairs {
        bail_usage!("{}: the model scores pairs of texts and computes no vectors; `serve` has /v1/rerank", args.model);
    }
    let full = model.info().num_dimensions;
    let num_dimensions = args.dimensions.map_or(full, |wanted| wanted as usize);
    if !model.shorter.allows(num_dimensions, full) {
        bail_usage!("--dimensions {num_dimensions}: expected {}", model.shorter.describe(full));
    }
    let mut index = 0;
    let mut print = |texts: Vec<String>| -> Result<()> {
        let inputs = texts.iter().enumerate().map(|(i, text)| encode(&model, text, index + i, args.truncate));
        let inputs = inputs.collect::<Result<Vec<EmbeddingInput>>>()?;
        let lengths: Vec<usize> = inputs.iter().map(|input| input.ids.len()).collect();
        let found = model.handle.embed(TenantId(0), inputs)?;
        for (values, tokens) in found.vectors().zip(lengths) {
            let vector = finished_vector(values, num_dimensions, !args.no_normalize);
            if args.json {
                output.write_json(&json!({ "index": index, "tokens": tokens, "embedding": vector }))?;
            } else {
                let values: Vec<String> = vector.iter().map(f32::to_string).collect();
                writeln!(output, "{}", values.join(" "))?;
            }
            index += 1;
        }
        Ok(output.flush()?)
    };
    if !args.texts.is_empty() {
        return args.texts.chunks(TEXTS_AT_ONCE).try_for_each(|texts| print(texts.to_vec()));
    }
    let mut texts = Vec::new();
    for (number, line) in std::io::stdin().lock().split(b'\n').enumerate() {
        let mut line = line.context("could not read standard input")?;
        line.pop_if(|last| *last == b'\r');
        texts.push(text_file::utf8(line, &format!("line {} of standard input", number + 1))?);
        if texts.len() == TEXTS_AT_ONCE {
            print(std::mem::take(&mut texts))?;
        }
    }
    if texts.is_empty() { Ok(()) } else { print(texts) }
}

fn encode(model: &LoadedEmbedder, text: &str, index: usize, truncate: bool) -> Result<EmbeddingInput> {
    let limit = model.info().context_len;
    let input = model.encode(text, truncate.then_some(limit)).with_context(|| format!("text {}", index + 1))?;
    match input.ids.len() {
        0 => Err(UsageError::because(format!("text {} has no tokens; expected a text", index + 1))),
        tokens if tokens > limit => Err(UsageError::because(format!(
            "text {} has {tokens} tokens, but the model's context holds {limit}; use --truncate to cut it",
            index + 1
        ))),
        _ => Ok(input),
    }
}
