//! The trace for people, in 50 to 200 columns: the sampling chain in words, a legend, then each token's table, draw
//! and text so far.

use pellucid_engine::Proposal;
use pellucid_generate::TokenVerdict;
use pellucid_sampling::{Logprobs, RunnerTrace, SamplingParams, StepKind, TokenTrace};
use pellucid_tokenizer::Tokenizer;

use super::table::{CandidateRow, Cell, Table};
use crate::terminal::cells::{
    Ink, Paint, bar, beginning, ending, left_aligned, one_line, right_aligned, share, visible, width, wrapped,
};

use crate::terminal::format::grouped;

/// Columns of a page: narrower ones have no place for a table, and lines of wider ones are hard to follow.
pub(super) const WIDTHS: std::ops::RangeInclusive<usize> = 50..=200;
/// Columns below which a page is narrow: tables give up their bars, and formulas are left out.
const NARROW: usize = 72;
const MARGIN: &str = "   ";
/// Width of the model's own probability.
const MODEL: usize = 7;
/// Width of the gap between the table and its last bars.
const GAP: usize = 2;
const LONGEST_BAR: usize = 40;
/// Width of the shortest bar that is worth its place.
const SHORTEST_BAR: usize = 4;
/// Width of the label of a line below the table.
const TOPIC: usize = 9;

pub(super) struct Page<'t> {
    pub(super) tokenizer: &'t Tokenizer,
    pub(super) params: &'t SamplingParams,
    pub(super) vocab_size: usize,
    pub(super) num_rows: usize,
    pub(super) paint: Paint,
    /// Whether there are drafters, so that the legend explains their proposals.
    pub(super) shows_proposals: bool,
    /// Columns, one of [`WIDTHS`].
    pub(super) width: usize,
}

/// The text so far.
#[derive(Debug, Default)]
pub(super) struct Written {
    pub(super) before: String,
    /// Text that the newest token added; empty while a character is incomplete.
    pub(super) fresh: String,
}

impl Page<'_> {
    /// Returns the part that is common to all tokens: title, prompt and chain.
    pub(super) fn head(&self, title: &str, prompt: &[u32], chain: &[(StepKind, String)]) -> String {
        let mut lines: Vec<String> =
            wrapped(title, self.width).iter().map(|line| self.paint.ink(Ink::Strong, line)).collect();
        lines.push(String::new());
        lines.push(format!("prompt, {} tokens", prompt.len()));
        lines.extend(self.prompt(prompt));
        lines.push(String::new());
        lines.extend(wrapped("steps that change the model's probabilities, in this order", self.width));
        for (number, (kind, setting)) in (1..).zip(chain) {
            let label = format!("{number:>4}  {} {setting}", kind.name());
            let meaning = kind.meaning(self.params);
            let indent = if self.width < NARROW { 6 } else { 24 };
            let mut meaning = wrapped(&meaning, self.width - indent).into_iter();
            let label = &beginning(label.trim_end(), self.width);
            let strong = self.paint.ink(Ink::Strong, label);
            if width(label) < indent - 1 {
                let fill = " ".repeat(indent - width(label));
                lines.push(format!("{strong}{fill}{}", meaning.next().unwrap_or_default()));
            } else {
                lines.push(strong);
            }
            lines.extend(meaning.map(|line| " ".repeat(indent) + &line));
        }
        lines.push(String::new());
        lines.push("how to read the tables".into());
        let proposals = self.shows_proposals.then_some(PROPOSALS);
        let legend = LEGEND.into_iter().chain(proposals).flat_map(|text| wrapped(text, self.width - MARGIN.len()));
        lines.extend(legend.map(|line| MARGIN.to_owned() + &line));
        lines.push(String::new());
        joined(&lines)
    }

    /// Returns the last lines of the prompt, with its control tokens.
    fn prompt(&self, prompt: &[u32]) -> Vec<String> {
        const MAX_LINES: usize = 3;
        let text = self.tokenizer.decode(prompt, false);
        // Chat templates put each message on its own lines, so lines are the natural unit to cut.
        let all: Vec<String> = text.split_inclusive('\n').map(one_line).collect();
        let kept = &all[all.len().saturating_sub(MAX_LINES)..];
        let mut lines: Vec<String> = Vec::new();
        if kept.len() < all.len() {
            lines.push(format!("{MARGIN}…"));
        }
        lines.extend(kept.iter().map(|line| format!("{MARGIN}{}", beginning(line, self.width - MARGIN.len()))));
        lines.into_iter().map(|line| self.paint.ink(Ink::Faint, &line)).collect()
    }

    /// Returns the table of one token. `number` counts from 1.
    pub(super) fn token(
        &self,
        number: usize,
        trace: &TokenTrace,
        logprobs: &Logprobs,
        proposal: Option<Proposal>,
        verdicts: &[TokenVerdict],
        written: &Written,
    ) -> String {
        let table = Table::new(trace, logprobs, self.num_rows, self.vocab_size, max_columns(self.width));
        let mut lines =
            vec![self.rule(&format!("token {number} · position {} · id {}", trace.position, trace.draw.winner.id))];
        lines.extend(self.table(&table, trace));
        lines.push(String::new());
        if let Some(step) = trace.steps.iter().find(|step| step.kind == StepKind::Mask) {
            let num_cut = grouped((step.entered - step.left) as u64);
            lines.extend(self.paragraph("grammar", &format!("{}; {num_cut} tokens were cut", step.setting)));
        }
        lines.extend(self.race(trace));
        let own = f64::from(trace.logprob);
        let surprise = format!(
            "gave it {} (ln p = {own:.3}, a surprise of {:.2} bits)",
            share(own.exp()),
            // Avoids -0.0.
            (-own / std::f64::consts::LN_2).max(0.0)
        );
        lines.extend(self.paragraph("model", &surprise));
        lines.extend(proposal.into_iter().flat_map(|proposal| self.proposal(proposal, trace.draw.winner.id)));
        if !verdicts.is_empty() {
            let each = verdicts.iter().map(|verdict| format!("{} {}", verdict.guard, verdict.kind.verdict()));
            lines.extend(self.paragraph("guards", &each.collect::<Vec<_>>().join(", ")));
        }
        lines.extend(self.text(trace.draw.winner.id, written));
        lines.push(String::new());
        joined(&lines)
    }

    fn rule(&self, title: &str) -> String {
        let line = format!("━━━ {title} ");
        let rest = "━".repeat(self.width.saturating_sub(width(&line)));
        self.paint.ink(Ink::Strong, &(line + &rest))
    }

    fn table(&self, table: &Table<'_>, trace: &TokenTrace) -> Vec<String> {
        let shape = Shape::new(self.width, table.columns.len());
        let faint = |text: String| self.paint.ink(Ink::Faint, &text);
        let mut lines = Vec::new();
        let labels: Vec<String> = table.columns.iter().map(|step| step.kind.label(self.params).to_owned()).collect();
        let settings: Vec<String> =
            table.columns.iter().map(|step| beginning(&step.kind.short_setting(self.params), shape.step - 1)).collect();
        let (chance, draw) = match shape.last_bar {
            9.. => ("chance in", "the draw"),
            SHORTEST_BAR.. => ("", "draw"),
            _ => ("", ""),
        };
        let heads = |first: &str, model: &str, cells: &[String], last: &str| {
            let cells: String = cells.iter().map(|cell| right_aligned(cell, shape.step)).collect();
            let model = left_aligned(&right_aligned(model, MODEL), MODEL + shape.model_part());
            let line = format!("{}{model}{cells}{}{last}", left_aligned(first, shape.name), " ".repeat(GAP));
            line.trim_end().to_owned()
        };
        lines.push(faint(heads("   candidate", "model", &labels, chance)));
        lines.push(faint(heads("", "", &settings, draw)));
        // Both kinds of bar have one scale, so that they can be compared.
        let fullest = table.rows.iter().flat_map(|row| [row.model.probability(), row.last.probability()]);
        let full = fullest.fold(1e-300, f64::max);
        lines.extend(table.rows.iter().map(|row| self.row(row, trace, &shape, full)));
        lines.push(faint(rest_line(table, &shape)));
        let lefts: Vec<String> = table.columns.iter().map(|step| count(step.left, shape.step)).collect();
        lines.push(faint(heads("   still in", &grouped(table.entered as u64), &lefts, "")));
        if !table.without_column.is_empty() {
            let names: Vec<&str> = table.without_column.iter().map(|step| step.name).collect();
            let text = format!("too narrow for the columns of {}", names.join(", "));
            lines.extend(
                wrapped(&text, self.width - MARGIN.len()).into_iter().map(|line| faint(MARGIN.to_owned() + &line)),
            );
        }
        lines
    }

    fn row(&self, row: &CandidateRow, trace: &TokenTrace, shape: &Shape, full: f64) -> String {
        let is_winner = row.id == trace.draw.winner.id;
        let is_out = row.last == Cell::Gone;
        let ink = match (is_winner, is_out) {
            (true, _) => Ink::Winner,
            (false, true) => Ink::Faint,
            (false, false) => Ink::Plain,
        };
        let mark = if is_winner { " ▶ " } else { MARGIN };
        let name =
            left_aligned(&beginning(&self.name(row.id), shape.name - MARGIN.len() - 1), shape.name - MARGIN.len());
        let mut line = self.paint.ink(ink, &format!("{mark}{name}{}", right_aligned(&cell_text(row.model), MODEL)));
        if shape.model_bar > 0 {
            let before = bar(row.model.probability() / full, shape.model_bar);
            line += &format!(" {}", self.paint.ink(Ink::Before, &left_aligned(&before, shape.model_bar)));
        }
        for &cell in &row.after {
            let ink = if cell == Cell::Cut { Ink::Cut } else { ink };
            line += &self.paint.ink(ink, &right_aligned(&cell_text(cell), shape.step));
        }
        let after = bar(row.last.probability() / full, shape.last_bar);
        let ink = if is_winner { Ink::Winner } else { Ink::After };
        line += &format!("{}{}", " ".repeat(GAP), self.paint.ink(ink, &after));
        line.trim_end().to_owned()
    }

    /// Describes the draw.
    fn race(&self, trace: &TokenTrace) -> Vec<String> {
        let winner = trace.draw.winner;
        let name = |id| beginning(&self.name(id), 24);
        let Some(second) = trace.draw.runner_up else {
            let greedy = trace.steps.iter().any(|step| step.kind == StepKind::Temperature && step.left == 1);
            let why = if greedy && self.params.temperature == 0.0 {
                format!("none: at temperature 0 the highest logit wins, and that is {}", name(winner.id))
            } else {
                format!("none: {} is the only one left", name(winner.id))
            };
            return self.paragraph("race", &why);
        };
        let entrants = grouped(trace.draw.entrants as u64);
        let what = format!("{entrants} run; each takes the time -ln(u) / p, and the shortest wins");
        let slowest = winner.time.max(second.time);
        let times = |ratio: f64| if ratio < 9.95 { format!("{ratio:.1}") } else { format!("{ratio:.0}") };
        let odds = if winner.probability < second.probability {
            format!("{} was more probable, but {} had the luckier u", name(second.id), name(winner.id))
        } else {
            format!("{} would have needed {} times as long", name(second.id), times(second.time / winner.time))
        };
        let mut lines = self.paragraph("race", &what);
        lines.push(self.lane("1st", winner, slowest, Ink::Winner));
        lines.push(self.lane("2nd", second, slowest, Ink::After));
        lines.extend(self.paragraph("", &odds));
        lines
    }

    fn lane(&self, place: &str, runner: RunnerTrace, slowest: f64, ink: Ink) -> String {
        let time = right_aligned(&figures(runner.time), 9);
        let head = if self.width < NARROW {
            let name = left_aligned(&beginning(&self.name(runner.id), 10), 10);
            format!("{place} {name} {time}")
        } else {
            let name = left_aligned(&beginning(&self.name(runner.id), 15), 15);
            let formula = format!("-ln({}) / {} = {time}", figures(runner.u), figures(runner.probability));
            format!("{place} {name} {}", right_aligned(&formula, 36))
        };
        let columns = self.width.saturating_sub(MARGIN.len() + TOPIC + width(&head) + 1).min(LONGEST_BAR);
        let lane = bar(runner.time / slowest, columns);
        let line = format!("{MARGIN}{}{head} {}", " ".repeat(TOPIC), self.paint.ink(ink, &lane));
        line.trim_end().to_owned()
    }

    /// Describes what a drafter proposed in place of the token `chosen`.
    fn proposal(&self, proposal: Proposal, chosen: u32) -> Vec<String> {
        let drafter = proposal.drafter.name();
        let text = match proposal.token == chosen {
            true => format!("✓ {drafter} proposed it: accepted"),
            false => format!("✗ {drafter} proposed {}: rejected", beginning(&self.name(proposal.token), 24)),
        };
        self.paragraph("draft", &text)
    }

    /// Returns the end of the text with the new token marked, by colour or by a line below it.
    fn text(&self, id: u32, written: &Written) -> Vec<String> {
        let columns = self.width - MARGIN.len() - TOPIC;
        // An incomplete character has no text yet, so its bytes are shown.
        let fresh = if written.fresh.is_empty() { self.name(id) } else { one_line(&written.fresh) };
        let fresh = beginning(&fresh, columns / 2);
        let before = ending(&one_line(&written.before), columns - width(&fresh));
        let mut lines = vec![self.line("text", &format!("{before}{}", self.paint.ink(Ink::Fresh, &fresh)))];
        if !self.paint.is_on {
            lines.push(self.line("", &format!("{}{}", " ".repeat(width(&before)), "^".repeat(width(&fresh)))));
        }
        lines
    }

    /// Returns a text with its topic, in lines.
    fn paragraph(&self, topic: &str, text: &str) -> Vec<String> {
        let lines = wrapped(text, self.width - MARGIN.len() - TOPIC);
        let first = std::iter::once(topic).chain(std::iter::repeat(""));
        lines.iter().zip(first).map(|(line, topic)| self.line(topic, line)).collect()
    }

    fn line(&self, topic: &str, text: &str) -> String {
        let topic = self.paint.ink(Ink::Strong, &left_aligned(topic, TOPIC));
        format!("{MARGIN}{topic}{text}").trim_end().to_owned()
    }

    /// Returns the text of a token, or its id if it has none.
    fn name(&self, id: u32) -> String {
        match self.tokenizer.token(id) {
            Some(token) if !token.bytes.is_empty() => visible(&token.bytes),
            _ => format!("#{id}"),
        }
    }

    pub(super) fn foot(&self, how: &str, text: &str) -> String {
        let mut lines = vec![self.rule("the end")];
        lines.extend(wrapped(how, self.width - MARGIN.len()).into_iter().map(|line| MARGIN.to_owned() + &line));
        lines.push(String::new());
        lines.extend(text.trim_end().lines().flat_map(|line| wrapped(&one_line(line), self.width - MARGIN.len())).map(
            |line| {
                // A word longer than a line is cut; `run` shows the whole text.
                format!("{MARGIN}{}", beginning(&line, self.width - MARGIN.len())).trim_end().to_owned()
            },
        ));
        joined(&lines)
    }
}

/// Explains the tables to someone who sees one for the first time.
const LEGEND: [&str; 4] = [
    "A row is a token that could come next; ␣ is a space, ⏎ a line end. ▶ marks the one that was drawn.",
    "\"model\" is the probability that the model gives it. Each column to the right has the probability after one step: \
     what a step takes from some tokens, the others gain.",
    "\"cut\": this step removed the token; \"·\": an earlier one did; \"…\": not recorded. \"still in\" counts the \
     tokens that are left.",
    "Bars, where there is room, show the probability by the model (left) and in the draw (right), on one scale.",
];

/// Explains the line of a drafter.
const PROPOSALS: &str = "\"draft\" names the drafter that proposed a token for this position: ✓ accepted, because the \
                         model chose the same token; ✗ rejected. Proposals do not change which token is chosen.";

/// Returns the number of steps that have a column in a page of `width` columns.
fn max_columns(width: usize) -> usize {
    let bars = if width < NARROW { 0 } else { 1 + GAP + 2 * SHORTEST_BAR };
    (width - name_width(width) - MODEL - bars) / MIN_STEP
}

/// Width of a candidate's text with the mark before it, in columns of the terminal.
fn name_width(width: usize) -> usize {
    match width {
        ..NARROW => 14,
        NARROW..120 => 19,
        _ => 27,
    }
}

/// Columns that a step needs.
const MIN_STEP: usize = 7;

/// Column widths, which depend on the page and on the number of steps.
struct Shape {
    name: usize,
    /// Columns of a step.
    step: usize,
    /// Columns of the bars beside the model's probability; 0 without such bars.
    model_bar: usize,
    /// Columns of the bars of the draw; 0 without such bars.
    last_bar: usize,
}

impl Shape {
    fn new(width: usize, num_steps: usize) -> Shape {
        let name = name_width(width);
        let rest = |step: usize| width.saturating_sub(name + MODEL + num_steps * step);
        let step = if width >= NARROW && rest(MIN_STEP + 1) >= 1 + GAP + 2 * 9 { MIN_STEP + 1 } else { MIN_STEP };
        let rest = rest(step);
        let (model_bar, last_bar) = match rest.saturating_sub(1 + GAP) / 2 {
            half @ SHORTEST_BAR.. => (half.min(LONGEST_BAR), half.min(LONGEST_BAR)),
            _ if rest >= GAP + SHORTEST_BAR => (0, rest - GAP),
            _ => (0, 0),
        };
        Shape { name, step, model_bar, last_bar }
    }

    /// Columns between the model's probability and the first step.
    fn model_part(&self) -> usize {
        if self.model_bar > 0 { 1 + self.model_bar } else { 0 }
    }
}

/// Returns the row of all candidates without a row of their own.
fn rest_line(table: &Table<'_>, shape: &Shape) -> String {
    let rest = |left: usize, cells: &mut dyn Iterator<Item = Cell>| {
        let (mut shown, mut sum) = (0, 0.0);
        for cell in cells {
            shown += usize::from(matches!(cell, Cell::In(_)));
            sum += cell.probability();
        }
        // A sum this small is rounding error.
        if left > shown { share((1.0 - sum).max(0.0)) } else { String::new() }
    };
    let model = rest(table.entered, &mut table.rows.iter().map(|row| row.model));
    let mut line =
        left_aligned("   all others", shape.name) + &right_aligned(&model, MODEL) + &" ".repeat(shape.model_part());
    for (index, step) in table.columns.iter().enumerate() {
        line += &right_aligned(&rest(step.left, &mut table.rows.iter().map(|row| row.after[index])), shape.step);
    }
    line.trim_end().to_owned()
}

fn cell_text(cell: Cell) -> String {
    match cell {
        Cell::In(probability) => share(probability),
        Cell::Cut => "cut".into(),
        Cell::Gone => "·".into(),
        Cell::Unrecorded => "…".into(),
    }
}

/// Formats a number of candidates for a column: a narrow one has no place for the comma of six digits.
fn count(candidates: usize, columns: usize) -> String {
    let text = grouped(candidates as u64);
    if text.len() < columns { text } else { candidates.to_string() }
}

/// Formats a number above 0 with about four significant digits.
fn figures(value: f64) -> String {
    // Close to 1, the difference to 1 matters, so there are more digits.
    if (0.999..1.0).contains(&value) {
        return format!("{value:.7}");
    }
    match value {
        100_000.0.. => format!("{value:.2e}"),
        1000.0.. => format!("{value:.0}"),
        100.0.. => format!("{value:.1}"),
        10.0.. => format!("{value:.2}"),
        0.001.. => format!("{value:.4}"),
        _ => format!("{value:.2e}"),
    }
}

fn joined(lines: &[String]) -> String {
    lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_to_their_columns() {
        assert_eq!([count(151_936, 8), count(151_936, 7), count(40, 7)], ["151,936", "151936", "40"]);
        for value in [1e-9, 0.00123, 0.5, 0.9995, 0.9999999, 1.0, 12.345, 999.99, 12_345.6, 1e9, 1e300] {
            assert!(figures(value).len() <= 9, "{}", figures(value));
        }
        assert_eq!([figures(0.5), figures(0.9999999), figures(0.0001)], ["0.5000", "0.9999999", "1.00e-4"]);
    }

    #[test]
    fn a_proposal_says_who_and_whether_it_was_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        std::fs::write(&path, pellucid::TINY_MODEL).unwrap();
        let checkpoint = pellucid_checkpoint::Checkpoint::open(&path).unwrap();
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
        let page = Page {
            tokenizer: &tokenizer,
            params: &SamplingParams::default(),
            vocab_size: tokenizer.vocab_size(),
            num_rows: 4,
            paint: Paint { is_on: false },
            shows_proposals: true,
            width: 60,
        };
        let id = tokenizer.encode_within(" there")[0];
        let proposal = Proposal { drafter: pellucid_engine::DrafterKind::Ngram, token: id };
        assert_eq!(page.proposal(proposal, id), ["   draft    ✓ ngram proposed it: accepted"]);
        assert_eq!(page.proposal(proposal, id + 1), ["   draft    ✗ ngram proposed ␣there: rejected"]);
        assert!(page.head("title", &[id], &[]).contains("\"draft\" names the drafter"));
        assert!(!Page { shows_proposals: false, ..page }.head("title", &[id], &[]).contains("drafter"));
    }

    #[test]
    fn every_number_of_steps_fits() {
        for width in WIDTHS {
            assert!(max_columns(width) >= 4, "{width}");
            for num_steps in 0..=max_columns(width) {
                let Shape { name, step, model_bar, last_bar } = Shape::new(width, num_steps);
                let bars =
                    if model_bar > 0 { 1 + model_bar } else { 0 } + if last_bar > 0 { GAP + last_bar } else { 0 };
                let total = name + MODEL + num_steps * step + bars;
                assert!(total <= width && step >= MIN_STEP, "{num_steps} steps in {width} columns: {total}");
            }
        }
        let bar = Shape::new(80, 6).last_bar;
        assert!(bar >= SHORTEST_BAR && max_columns(80) == 6, "{bar}");
    }
}
