//! `pellucid pull`: downloads a model into the store.

use crate::hub::Hub;
use crate::terminal::output::Output;
use anyhow::Result;
use std::io::Write;

/// Download a model into the store; an interrupted pull resumes
///
/// Prints the path of the model. For a repository with several GGUF files, name
/// one; for one without GGUF files, the safetensors are pulled with config and
/// tokenizer. For private or gated models, set HF_TOKEN.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct PullArgs {
    /// smollm2, OWNER/REPO, OWNER/REPO:Q4_K_M or OWNER/REPO/FILE.gguf
    name: String,

    /// Branch, tag or commit
    #[arg(long, value_name = "REVISION", default_value = "main")]
    revision: String,
}

pub(crate) fn run(args: &PullArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let manifest = hub.pull(&args.name, &args.revision)?;
    writeln!(output, "{}", hub.store.entry(&manifest).display())?;
    Ok(())
}
