//! `pellucid perplexity`: measures how well a model predicts a text, to check a quantization or an engine.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid_engine::{Event, Request};
use pellucid_sampling::SamplingParams;
use serde_json::json;

use crate::flags::compute::ComputeArgs;
use crate::flags::text_file;
use crate::flags::usage_error::{OrUsage, bail_usage};
use crate::hub::Hub;
use crate::terminal::output::Output;
use crate::terminal::stdin;

/// Measure how well a model predicts a text
///
/// The tokens of the text are split into windows. Each window begins with the
/// tokens that the model expects before every text, if any, and each further
/// token is predicted from those before it. An incomplete last window is left
/// out. Perplexity is exp of the mean negative log-likelihood: lower is better.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct PerplexityArgs {
    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    model: String,

    /// Text file, or - for standard input
    file: PathBuf,

    /// Tokens of each window
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..))]
    window: u32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    compute: ComputeArgs,
}

pub(crate) fn run(args: &PerplexityArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let text = if args.file.as_os_str() == "-" {
        stdin::read_text()?
    } else {
        let bytes =
            std::fs::read(&args.file).with_context(|| format!("could not read {}", args.file.display())).or_usage()?;
        text_file::utf8(bytes, &args.file.display().to_string())?
    };
    let path = hub.resolve(Some(&args.model))?;
    let model = args.compute.open(&path, 1, hub)?.model;
    let (prefix, ids) = (model.tokenizer.prefix(), model.tokenizer.encode(&text));
    let window = args.window as usize;
    let Some(text_tokens) = window.checked_sub(prefix.len()).filter(|&tokens| window > 1 && tokens > 0) else {
        bail_usage!("--window {window}: too small, because the model adds {} tokens before every text", prefix.len());
    };
    let windows: Vec<Vec<u32>> = ids.chunks_exact(text_tokens).map(|text| [prefix, text].concat()).collect();
    // The tokens that are added before the text are not scored.
    let not_scored = prefix.len().saturating_sub(1);
    if windows.is_empty() {
        bail_usage!(
            "the text has {} tokens, fewer than the {text_tokens} of one window; use a longer text or a smaller \
             --window",
            ids.len()
        );
    }
    if window >= model.context_len {
        bail_usage!(
            "--window {window}: the model's context holds {}, of which a window may use all but one",
            model.context_len
        );
    }
    let bar = bar(windows.len() * window);
    let mut losses: Vec<f64> = Vec::new();
    for (i, ids) in windows.iter().enumerate() {
        let mut in_window = 0;
        let mut request = Request::new(ids.clone(), SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        request.score_prompt = true;
        request.max_tokens = Some(1);
        let stream = model.engine.submit(request)?;
        while let Some(event) = stream.next_event() {
            match event {
                Event::PromptProgress { computed, .. } => bar.set_position((i * window + computed) as u64),
                Event::PromptLogprobs(logprobs) => {
                    let skipped = not_scored.saturating_sub(in_window);
                    in_window += logprobs.len();
                    losses.extend(logprobs.iter().skip(skipped).map(|one| -f64::from(one.chosen)));
                }
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
    }
    bar.finish_and_clear();
    let count = losses.len() as f64;
    let mean = losses.iter().sum::<f64>() / count;
    let variance = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    let perplexity = mean.exp();
    // To first order, the error of exp(mean) is exp(mean) times the standard error of the mean.
    let error = perplexity * (variance / count).sqrt();
    if !perplexity.is_finite() {
        bail!("the model's logits are not finite: the mean negative log-likelihood is {mean}");
    }
    if args.json {
        let result = json!({
            "perplexity": perplexity,
            "standard_error": error,
            "mean_negative_log_likelihood": mean,
            "tokens": ids.len(),
            "scored_tokens": losses.len(),
            "windows": windows.len(),
            "window_tokens": window,
        });
        return Ok(output.write_json(&result)?);
    }
    writeln!(output, "perplexity {perplexity:.4} +/- {error:.4}")?;
    writeln!(output, "{} of {} tokens scored, {} windows of {window}", losses.len(), ids.len(), windows.len())?;
    Ok(())
}

fn bar(num_tokens: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(num_tokens as u64), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("scoring {bar:24} {pos}/{len} tokens {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
