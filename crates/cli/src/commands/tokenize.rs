//! `pellucid tokenize`: text to ids and back, for scripts and for comparing tokenizers.

use crate::hub::Hub;
use crate::terminal::output::Output;
use crate::terminal::{stdin, token_table};
use anyhow::Result;
use pellucid_checkpoint::Checkpoint;
use pellucid_tokenizer::Tokenizer;
use std::io::Write;

/// Print the token ids of the text on standard input, on one line
///
/// The ids are those of the text alone. The model file needs no weights.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct TokenizeArgs {
    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    model: String,

    /// Add the tokens that the model expects before and after a
    /// text, and encode control tokens such as <|im_start|>
    #[arg(long, verbatim_doc_comment, conflicts_with = "decode")]
    special: bool,

    /// Print id, piece, bytes and kind of each token as a JSON array
    #[arg(long, conflicts_with = "decode")]
    json: bool,

    /// Read ids (separated by spaces, commas, line ends or JSON
    /// brackets) and write their text, byte for byte
    #[arg(long, verbatim_doc_comment)]
    decode: bool,
}

pub(crate) fn run(args: &TokenizeArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let path = hub.resolve(Some(&args.model))?;
    let checkpoint = Checkpoint::open(&path)?;
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
    let text = stdin::read_text()?;
    if args.decode {
        let ids = token_table::parse_ids(&text)?;
        token_table::check_ids(&tokenizer, &ids)?;
        output.write_all(&tokenizer.decode_bytes(&ids, false))?;
        return Ok(());
    }
    let ids = if args.special {
        [tokenizer.prefix(), &tokenizer.encode_special(&text), tokenizer.suffix()].concat()
    } else {
        tokenizer.encode(&text)
    };
    if args.json {
        return Ok(output.write_json(&token_table::to_json(&tokenizer, &ids)?)?);
    }
    for (index, id) in ids.iter().enumerate() {
        let space = if index == 0 { "" } else { " " };
        write!(output, "{space}{id}")?;
    }
    writeln!(output)?;
    Ok(())
}
