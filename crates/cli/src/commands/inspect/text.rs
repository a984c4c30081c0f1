//! The report of `inspect` as text of 80 columns. Control characters in names from the file are escaped.

use super::report::{KvMemory, Report, single};
use crate::terminal::format::{bytes_text, count_text, escaped, grouped};
use crate::terminal::token_table;
use anyhow::Result;
use pellucid_checkpoint::Checkpoint;
use pellucid_tokenizer::Tokenizer;
use std::io::Write;

/// Column at which the second column begins.
const LABEL_WIDTH: usize = 16;

pub(super) fn write_report(report: &Report, tokenizer: Option<&Tokenizer>, output: &mut impl Write) -> Result<()> {
    let numbers = &report.numbers;
    let checkpoint = report.checkpoint;
    let mut line = |label: &str, text: String| writeln!(output, "{label:LABEL_WIDTH$}{text}");
    if let Some(name) = &numbers.name {
        line("name", escaped(name))?;
    }
    line("architecture", escaped(&report.architecture))?;
    if let Some(results) = &report.computes {
        line("computes", results.clone())?;
    }
    if let Some(reason) = &report.cannot_run {
        line("can be run", format!("no: {}", escaped(reason)))?;
    }
    if report.num_parameters > 0 {
        line("parameters", format!("{} ({})", count_text(report.num_parameters), grouped(report.num_parameters)))?;
    }
    let bytes = checkpoint.file_bytes();
    let files = match checkpoint.files().len() {
        1 => String::new(),
        count => format!(" in {count} files"),
    };
    line("file size", format!("{} ({} bytes){files}", bytes_text(bytes), grouped(bytes)))?;
    if let Some(vocabulary) = numbers.vocabulary {
        line("vocabulary", format!("{} tokens", grouped(vocabulary)))?;
    }
    if let Some(context) = numbers.context_tokens {
        line("context", format!("{} tokens", grouped(context)))?;
    }
    if let Some(layers) = numbers.num_layers {
        let width = numbers.width.map_or_else(String::new, |width| format!(", {} wide", grouped(width)));
        line("layers", format!("{}{width}", grouped(layers)))?;
        for (name, count) in &numbers.layer_kinds {
            line("", format!("{} {name}", grouped(*count)))?;
        }
    }
    if let Some(heads) = heads_text(report) {
        line("heads", heads)?;
    }
    if let Some(latent) = numbers.latent_attention {
        let (row, rotary) = (latent.row_size(), latent.rotary_size);
        line("latents", format!("{row} values a token in a layer, {rotary} of them rotated, for all heads"))?;
    }
    if let Some(experts) = numbers.num_experts {
        line("experts", grouped(experts))?;
    }
    line("chat template", if checkpoint.chat_template().is_some() { "yes" } else { "no" }.to_owned())?;
    for (index, (purpose, id)) in numbers.special_ids.iter().enumerate() {
        let label = if index == 0 { "special ids" } else { "" };
        let text = tokenizer.and_then(|tokenizer| token_table::text(tokenizer, *id)).unwrap_or_default();
        line(label, format!("{id:>7}  {purpose:12} {text}").trim_end().to_owned())?;
    }
    if let Some(prefix) = tokenizer.map(Tokenizer::prefix).filter(|prefix| !prefix.is_empty()) {
        let ids: Vec<_> = prefix.iter().map(u32::to_string).collect();
        line("prepended ids", ids.join(" "))?;
    }
    write_types(report, output)?;
    if let Some(kv) = &report.kv {
        write_kv(report, kv, output)?;
    }
    if numbers.state_bytes > 0 {
        let state = format!("{} ({} bytes)", bytes_text(numbers.state_bytes), grouped(numbers.state_bytes));
        writeln!(output, "\nrecurrent state\n{:LABEL_WIDTH$}{state}, at any length", "  a sequence")?;
    }
    Ok(())
}

fn heads_text(report: &Report) -> Option<String> {
    let numbers = &report.numbers;
    let mut text = format!("{} query", numbers.num_heads?);
    if let Some(latent) = numbers.latent_attention {
        let (key, value) = (latent.key_size(), latent.value_size);
        return Some(text + &format!(", keys of {key} and values of {value} elements, made from latents"));
    }
    match (single(&numbers.kv_heads), numbers.kv_heads.iter().min(), numbers.kv_heads.iter().max()) {
        (Some(heads), _, _) => text += &format!(", {heads} key/value"),
        (None, Some(min), Some(max)) => text += &format!(", {min} to {max} key/value by layer"),
        _ => {}
    }
    match (numbers.key_size, numbers.value_size) {
        (Some(key), Some(value)) if key == value => text += &format!(", {key} values each"),
        (Some(key), Some(value)) => text += &format!(", keys of {key} and values of {value} elements"),
        _ => {}
    }
    Some(text)
}

fn write_types(report: &Report, output: &mut impl Write) -> Result<()> {
    if report.types.is_empty() {
        writeln!(output, "{:LABEL_WIDTH$}none: the file holds a vocabulary and no weights", "tensors")?;
        return Ok(());
    }
    writeln!(
        output,
        "\n{:LABEL_WIDTH$}{:>7}  {:>18}  {:>18}  {:>6}",
        "tensor type", "tensors", "parameters", "bytes", "bits"
    )?;
    for ((dtype, encoding), total) in &report.types {
        let bits = 8.0 * total.bytes as f64 / total.parameters as f64;
        let (parameters, bytes) = (grouped(total.parameters), grouped(total.bytes));
        writeln!(
            output,
            "{:LABEL_WIDTH$}{:>7}  {parameters:>18}  {bytes:>18}  {bits:>6.2}",
            encoding.unwrap_or(dtype.name()),
            total.tensors
        )?;
    }
    for note in report.checkpoint.notes() {
        writeln!(output, "{note}")?;
    }
    Ok(())
}

/// Writes the formula with its numbers, then the result.
fn write_kv(report: &Report, kv: &KvMemory, output: &mut impl Write) -> Result<()> {
    let numbers = &report.numbers;
    writeln!(output, "\nKV memory in {}", kv.dtype.name())?;
    let per_token = format!("{} bytes", grouped(kv.per_token));
    match (single(&numbers.kv_heads), numbers.key_size, numbers.value_size) {
        (Some(heads), Some(key), Some(value)) if key == value => {
            let layers = numbers.kv_heads.len();
            let bytes = match (kv.dtype.block_bytes(), kv.dtype.block_len()) {
                (bytes, 1) => bytes.to_string(),
                (bytes, len) => format!("{bytes}/{len}"),
            };
            writeln!(output, "{:LABEL_WIDTH$}{per_token}", "  a token")?;
            writeln!(
                output,
                "{:LABEL_WIDTH$}= 2 x {layers} layers x {heads} heads x {key} numbers x {bytes} bytes",
                ""
            )?;
        }
        _ => writeln!(output, "{:LABEL_WIDTH$}{per_token}", "  a token")?,
    }
    if let Some(total) = &kv.total {
        let bytes = format!("{} ({} bytes)", bytes_text(total.bytes), grouped(total.bytes));
        let sequences =
            if total.batch == 1 { "1 sequence".to_owned() } else { format!("{} sequences", grouped(total.batch)) };
        writeln!(output, "{:LABEL_WIDTH$}{bytes}", "  in all")?;
        writeln!(output, "{:LABEL_WIDTH$}= {sequences} of {} tokens", "", grouped(total.context_tokens))?;
        let within_windows = total.within_windows.filter(|bytes| *bytes < total.bytes);
        if let Some((windows, bytes)) = numbers.windows.zip(within_windows) {
            let of_layers = format!("{} of {} layers", windows.num_layers, numbers.kv_heads.len());
            let text =
                format!("{}: {of_layers} keep their last {} tokens", bytes_text(bytes), grouped(windows.num_tokens));
            writeln!(output, "{:LABEL_WIDTH$}{text}", "  on the CPU")?;
        }
    }
    Ok(())
}

pub(super) fn write_tensors(checkpoint: &Checkpoint, output: &mut impl Write) -> Result<()> {
    writeln!(output, "\n{:<38}{:<8}{:>14}  {:>18}", "tensor", "type", "bytes", "shape")?;
    for tensor in checkpoint.tensors() {
        let shape: Vec<_> = tensor.shape.iter().map(usize::to_string).collect();
        let bytes = grouped(tensor.num_bytes() as u64);
        writeln!(
            output,
            "{:<38}{:<8}{bytes:>14}  {:>18}",
            escaped(&tensor.name),
            tensor.dtype.name(),
            shape.join(" x ")
        )?;
    }
    Ok(())
}
