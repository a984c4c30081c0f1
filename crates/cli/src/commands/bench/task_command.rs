//! The command `bench --tasks`: loads the models, measures with `tasks.rs`, and prints.

use std::io::{IsTerminal, Write};

use anyhow::Result;
use pellucid::Speculation;
use pellucid_engine::Engine;
use pellucid_model::Model;
use pellucid_sampling::{SamplingDefaults, SamplingParams};
use pellucid_tokenizer::{Tokenizer, VocabularyDifference};
use serde_json::json;

use super::BenchArgs;
use super::tasks::{self, TaskBench};
use crate::commands::model_on_device::ModelOnDevice;
use crate::flags::usage_error::{OrUsage, bail_usage};
use crate::hub::Hub;
use crate::terminal::output::Output;

/// Maximum tokens of a reply unless `--max-tokens` says otherwise.
const DEFAULT_MAX_TOKENS: u32 = 256;

pub(super) fn run(args: &BenchArgs, file: &str, hub: &Hub, output: &mut Output) -> Result<()> {
    let tasks = tasks::read(file).or_usage()?;
    args.sampling.check().or_usage()?;
    let checkpoint = args.compute.checkpoint(&hub.resolve(args.model.as_deref())?, hub)?;
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
    let prompts = tasks::encode(&tasks, &tokenizer, checkpoint.chat_template())?;
    let backend = args.compute.backend()?;
    let max_tokens = args.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) as usize;
    let speculation =
        if args.speculation.is_given() { args.speculation.resolve(hub)? } else { Speculation::OFF.ngram() };
    if speculation.is_off() {
        bail_usage!("--tasks compares drafters with none, but --speculate names none");
    }
    let model = args.compute.decoder_for(&checkpoint, &backend, &speculation)?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + max_tokens;
    if longest > model.config().context_len {
        let context = model.config().context_len;
        bail_usage!("--tasks and --max-tokens need {longest} tokens, but the model's context holds {context}");
    }
    let draft = match speculation.draft_path() {
        Some(path) => {
            let checkpoint = args.compute.checkpoint(path, hub)?;
            let own = Tokenizer::from_checkpoint(&checkpoint)?;
            if let Some(difference) = VocabularyDifference::find(&tokenizer, &own) {
                bail_usage!("--speculate draft={}: the vocabularies differ: {difference}", path.display());
            }
            Some(ModelOnDevice::new(args.compute.decoder(&checkpoint, &backend)?, backend.clone()))
        }
        None => None,
    };
    let batches: Vec<usize> = args.speed.batch.as_deref().unwrap_or(&[1]).iter().map(|&n| n as usize).collect();
    let widest = batches.iter().copied().max().unwrap_or(1);
    let kv_dtype = args.compute.kv_type.dtype();
    let options = tasks::options(&prompts, max_tokens, widest, backend.chunk_len(), kv_dtype);
    // The most probable token unless a flag says otherwise, so that a measurement can be repeated.
    let mut sampling = match args.sampling.is_given() {
        true => args.sampling.params(&tokenizer, &SamplingDefaults::default()).or_usage()?,
        false => SamplingParams { temperature: 0.0, ..SamplingParams::default() },
    };
    sampling.end_ids = tokenizer.end_ids().to_vec();
    let add_drafters = |engine: &mut Engine| -> Result<()> {
        engine.set_speculation(speculation.options());
        if let Some(draft) = &draft {
            engine.set_draft_model(draft.share(), options.num_blocks)?;
        }
        Ok(())
    };
    let shows = std::io::stderr().is_terminal();
    let mut tell = |text: &str| {
        if shows {
            let _ = write!(std::io::stderr(), "\r\u{1b}[K{text}");
        }
    };
    let device = ModelOnDevice::new(model, backend.clone());
    let mut bench =
        TaskBench { device: &device, options, sampling, max_tokens, add_drafters: &add_drafters, progress: &mut tell };
    let results = bench.run(&tasks, &prompts, &batches, args.speed.repeat as usize)?;
    tell("");
    if args.json {
        return Ok(output.write_json(&json!({
            "model": checkpoint.path(), "speculate": speculation.to_string(), "device": backend.description(),
            "max_tokens": max_tokens, "rounds": args.speed.repeat, "tasks": results,
        }))?);
    }
    writeln!(output, "{}, {speculation}, {}\n", checkpoint.path().display(), backend.description())?;
    tasks::print(output, &results)?;
    Ok(())
}
