//! The results as text of 80 columns.

use std::io::{Result, Write};

use super::model::Machine;
use super::percentiles::Percentiles;
use super::serving::{Arrival, Level};
use super::speed::{Case, CaseResult};
use crate::terminal::format::{bytes_text, grouped};

pub(super) fn machine(out: &mut impl Write, machine: &Machine) -> Result<()> {
    writeln!(out, "{}: {}, {} a step", machine.model, bytes_text(machine.model_bytes), bytes_text(machine.step_bytes))?;
    writeln!(
        out,
        "{}, keys and values in {}; memory read at {}/s",
        machine.device,
        machine.kv_type,
        bytes_text(machine.read_bytes_per_second as u64)
    )
}

pub(super) fn speed(out: &mut impl Write, rows: &[CaseResult]) -> Result<()> {
    writeln!(out)?;
    writeln!(out, "{:<26}{:>10}{:>10}{:>10}{:>10}{:>12}", "", "tokens/s", "best", "ms/step", "TFLOP/s", "read limit")?;
    for row in rows {
        let name = match row.case {
            Case::Prefill { tokens } => format!("prefill {tokens}"),
            Case::Decode { sequences, depth: 0 } => format!("decode x {sequences}"),
            Case::Decode { sequences, depth } => format!("decode x {sequences} at {depth}"),
        };
        let limit = row.fraction_of_read_limit.map_or("".into(), |fraction| format!("{:.0} %", fraction * 100.0));
        writeln!(
            out,
            "{name:<26}{:>10}{:>10}{:>10.2}{:>10.3}{limit:>12}",
            rate(row.tokens_per_second),
            rate(row.best_tokens_per_second),
            row.step_ms,
            row.tflops,
        )?;
        if let Some(gathers) = row.gathers {
            let (number, bytes) = (grouped(gathers.number.round() as u64), bytes_text(gathers.bytes as u64));
            writeln!(out, "  of which {:.2} ms in {number} gathers of {bytes}", gathers.ms)?;
        }
    }
    Ok(())
}

pub(super) fn serving(out: &mut impl Write, levels: &[Level]) -> Result<()> {
    for level in levels {
        writeln!(out)?;
        writeln!(
            out,
            "{}: {} requests in {:.1} s, {} output tokens/s, {} prompt tokens/s",
            arrival(level.arrival),
            level.requests,
            level.seconds,
            rate(level.output_tokens_per_second),
            rate(level.prompt_tokens_per_second),
        )?;
        writeln!(out, "  {:<18}{:>14}{:>14}{:>14}", "", "p50", "p90", "p99")?;
        spread(out, "in the queue", level.queue_time)?;
        spread(out, "first token", level.time_to_first_token)?;
        spread(out, "each next token", level.time_per_output_token)?;
        spread(out, "end to end", level.end_to_end)?;
        writeln!(
            out,
            "  {:.1} % of the step time in the engine, KV memory at most {:.0} % in use,\n  {} cached tokens, \
             {} preemptions",
            level.engine_share * 100.0,
            level.kv_peak * 100.0,
            grouped(level.cached_tokens),
            level.preemptions,
        )?;
        if level.drafted_tokens > 0 {
            let (accepted, drafted) = (grouped(level.accepted_tokens), grouped(level.drafted_tokens));
            writeln!(out, "  {accepted} of {drafted} drafted tokens accepted")?;
        }
        if level.ahead_share > 0.0 {
            let (share, discarded) = (level.ahead_share * 100.0, grouped(level.discarded_tokens));
            writeln!(
                out,
                "  {share:.1} % of the steps were look-ahead steps; {discarded} of their tokens were discarded"
            )?;
        }
    }
    curve(out, levels)
}

/// Draws output tokens per second for each concurrency or rate as bars.
fn curve(out: &mut impl Write, levels: &[Level]) -> Result<()> {
    if levels.len() < 2 {
        return Ok(());
    }
    writeln!(out, "\noutput tokens/s")?;
    let most = levels.iter().map(|level| level.output_tokens_per_second).fold(0.0, f64::max);
    for level in levels {
        let bar = "#".repeat((level.output_tokens_per_second / most * 40.0).round() as usize);
        writeln!(out, "  {:<20}{:>10}  {bar}", arrival(level.arrival), rate(level.output_tokens_per_second))?;
    }
    Ok(())
}

fn arrival(arrival: Arrival) -> String {
    match arrival {
        Arrival::Concurrency(n) => format!("{n} at once"),
        Arrival::Rate(rate) => format!("{rate} a second"),
    }
}

fn spread(out: &mut impl Write, name: &str, spread: Option<Percentiles>) -> Result<()> {
    match spread {
        Some(spread) => {
            let [p50, p90, p99] = [spread.p50_ms, spread.p90_ms, spread.p99_ms].map(|ms| format!("{ms:.1} ms"));
            writeln!(out, "  {name:<18}{p50:>14}{p90:>14}{p99:>14}")
        }
        None => writeln!(out, "  {name:<18}{:>14}", "-"),
    }
}

/// Formats a value with three or four digits.
fn rate(value: f64) -> String {
    if value >= 999.5 { grouped(value.round() as u64) } else { format!("{value:.1}") }
}
