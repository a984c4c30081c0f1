//! The origin of rendered text: whether the template wrote it or a message did. This keeps users from forging control
//! tokens.
//!
//! A template may trim, split, join and quote message text before it prints it, so rendered text does not show its
//! origin. The template is therefore rendered twice. The first rendering is that of the reference implementation, and
//! is the text for the model. For the second, every visible character of the request is moved into a private plane of
//! Unicode: a mark that survives trimming, slicing, joining and quoting, and keeps the number of characters. If the
//! second rendering without its marks equals the first, the marks give the origin of each character: an unmarked
//! visible character was written by the template.
//!
//! A template that compares message text with text of its own (`'</think>' in content`) behaves differently on marked
//! text, and the renderings differ. The origin of single characters is then unknown, and this rule applies: a guarded
//! token is untrusted if the text of the request contains it, or contains a part that the template's text could
//! complete. Untrusted tokens are encoded as ordinary text, even if the template wrote them. That is safe, at the cost
//! of the template's own use of these tokens in this one conversation.

use std::collections::HashMap;
use std::ops::Range;

use serde_json::Value;

use super::Conversation;
use crate::added_tokens::{AddedToken, AddedTokens};
use crate::chat::Segment;
use crate::tokenizer::Tokenizer;

/// Planes 15 and 16 are for private use. Plane 15 holds the marked characters of plane 0, plane 16 those of plane 1.
const FIRST_MARK: u32 = 0xF_0000;
/// Stands for a character of the request beyond planes 0 and 1, which has no marked form.
const STAND_IN: char = char::REPLACEMENT_CHARACTER;

/// Returns the marked form of a visible character; white space is unchanged.
fn marked(c: char) -> char {
    match c {
        c if c.is_whitespace() => c,
        '\0'..='\u{1FFFF}' => char::from_u32(c as u32 + FIRST_MARK).unwrap_or(c),
        _ => STAND_IN,
    }
}

/// Returns the character without its mark.
pub(super) fn unmarked(c: char) -> char {
    match (c as u32).checked_sub(FIRST_MARK) {
        Some(plain) => char::from_u32(plain).unwrap_or(c),
        None => c,
    }
}

/// Returns `changed`, with a mark if `original` has one.
pub(super) fn marked_like(original: char, changed: char) -> char {
    if is_marked(original) { marked(changed) } else { changed }
}

fn is_marked(c: char) -> bool {
    c as u32 >= FIRST_MARK
}

/// Determines the origin of text, from the template's source and the tokens to protect.
pub(super) struct Origins {
    source: String,
    /// The template's own text: string literals, and text outside of tags; trimmed.
    own_text: Vec<String>,
    guarded: AddedTokens,
}

impl Origins {
    pub(super) fn new(source: &str, tokenizer: &Tokenizer) -> Origins {
        let ids = (0..tokenizer.vocab_size() as u32).filter(|&id| tokenizer.is_guarded(id));
        let token = |id: u32| tokenizer.token(id).map(|info| AddedToken::plain(id, info.piece));
        Origins {
            source: source.to_owned(),
            own_text: own_text(source),
            guarded: AddedTokens::new(ids.filter_map(token).collect()),
        }
    }

    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Returns a value of the request with all its text marked. Two kinds of text stay unmarked because templates
    /// compare them: roles, which were checked against a list, and the `type` of a part if the template's source quotes
    /// that word.
    pub(super) fn mark(&self, value: &Value, key: Option<&str>) -> Value {
        match value {
            Value::String(text) if self.stays_unmarked(text, key) => value.clone(),
            Value::String(text) => Value::String(text.chars().map(marked).collect()),
            Value::Array(items) => Value::Array(items.iter().map(|item| self.mark(item, None)).collect()),
            Value::Object(fields) => {
                let fields = fields.iter();
                Value::Object(fields.map(|(key, value)| (self.mark_key(key), self.mark(value, Some(key)))).collect())
            }
            other => other.clone(),
        }
    }

    fn stays_unmarked(&self, text: &str, key: Option<&str>) -> bool {
        match key {
            Some("role") if super::ROLES.contains(&text) => true,
            Some("role" | "type" | "reasoning_effort") => is_word(text) && self.names(text),
            _ => false,
        }
    }

    /// Returns a field name, marked unless the template reads that field.
    pub(super) fn mark_key(&self, key: &str) -> String {
        let read = is_word(key) && (self.names(key) || self.reads(key));
        if read { key.to_owned() } else { key.chars().map(marked).collect() }
    }

    /// Whether the source quotes this word.
    fn names(&self, word: &str) -> bool {
        self.own_text.iter().any(|text| text == word)
    }

    /// Whether the source contains this word as a variable or an attribute: somewhere as a whole word.
    fn reads(&self, word: &str) -> bool {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        self.source.match_indices(word).any(|(at, _)| {
            let before = self.source[..at].chars().next_back();
            let after = self.source[at + word.len()..].chars().next();
            // A word within a tag such as `<tool_call>` is no field.
            !before.is_some_and(|c| is_part(c) || c == '<' || c == '/' || c == '|')
                && !after.is_some_and(|c| is_part(c) || c == '>')
        })
    }

    /// Splits the rendered text by origin; `marked` is the second rendering, if it succeeded.
    pub(super) fn segments(&self, text: &str, marked: Option<&str>, conversation: &Conversation<'_>) -> Vec<Segment> {
        let by_marks = marked.filter(|_| !self.source.chars().any(is_marked)).and_then(|m| segments_by_marks(text, m));
        by_marks.unwrap_or_else(|| self.segments_by_tokens(text, conversation))
    }

    /// Splits the text without marks: guarded tokens to which text of the request could contribute are untrusted.
    fn segments_by_tokens(&self, text: &str, conversation: &Conversation<'_>) -> Vec<Segment> {
        let mut request_text = Vec::new();
        conversation.messages.iter().for_each(|message| collect_text(message, None, &mut request_text));
        conversation.tools.iter().for_each(|tools| collect_text(tools, None, &mut request_text));
        for (name, value) in conversation.extra.into_iter().flatten() {
            request_text.push(name.as_str());
            collect_text(value, Some(name), &mut request_text);
        }
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut is_untrusted: HashMap<u32, bool> = HashMap::new();
        self.guarded.find_all(text, &mut |token, range| {
            if *is_untrusted.entry(token.id).or_insert_with(|| self.could_come_from(&token.content, &request_text)) {
                ranges.push(range);
            }
        });
        let mut segments = Vec::new();
        let mut end = 0;
        for range in ranges {
            let start = range.start.max(end);
            if start >= range.end {
                continue;
            }
            if end < start {
                segments.push(Segment::trusted(&text[end..start]));
            }
            segments.push(Segment::untrusted(&text[start..range.end]));
            end = range.end;
        }
        if end < text.len() {
            segments.push(Segment::trusted(&text[end..]));
        }
        segments
    }

    /// Whether text of the request contains the token, or contains a part that the template's own text could complete.
    fn could_come_from(&self, token: &str, request_text: &[&str]) -> bool {
        let given = |part: &str| request_text.iter().any(|text| text.contains(part));
        if given(token) {
            return true;
        }
        let cuts: Vec<usize> = token.char_indices().map(|(at, _)| at).skip(1).collect();
        // Positions in the token where the template's own text may end, and where it may begin.
        let heads: Vec<usize> = cuts.iter().copied().filter(|&cut| self.own_text_ends_with(&token[..cut])).collect();
        let tails: Vec<usize> = cuts.iter().copied().filter(|&cut| self.own_text_starts_with(&token[cut..])).collect();
        heads
            .iter()
            .any(|&head| given(&token[head..]) || tails.iter().any(|&tail| head < tail && given(&token[head..tail])))
            || tails.iter().any(|&tail| given(&token[..tail]))
    }

    fn own_text_ends_with(&self, part: &str) -> bool {
        self.own_text.iter().any(|text| text.ends_with(part))
    }

    fn own_text_starts_with(&self, part: &str) -> bool {
        self.own_text.iter().any(|text| text.starts_with(part))
    }
}

/// Returns the string literals of a Jinja source, unescaped, and its text outside of tags.
fn own_text(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut keep = |text: &str| {
        let text = text.trim();
        if !text.is_empty() {
            found.push(text.to_owned());
        }
    };
    let mut rest = source;
    while let Some(start) = ["{{", "{%", "{#"].iter().filter_map(|open| rest.find(open)).min() {
        keep(&rest[..start]);
        let close = match &rest[start..start + 2] {
            "{{" => "}}",
            "{%" => "%}",
            _ => "#}",
        };
        rest = &rest[start + 2..];
        if close == "#}" {
            rest = rest.find(close).map_or("", |end| &rest[end + 2..]);
            continue;
        }
        // Within a tag, a quote opens a literal; the closing delimiter counts only outside of literals.
        while !rest.is_empty() && !rest.starts_with(close) {
            let Some(first) = rest.chars().next() else { break };
            rest = &rest[first.len_utf8()..];
            if first == '\'' || first == '"' {
                let (literal, after) = literal(rest, first);
                keep(&literal);
                rest = after;
            }
        }
        rest = rest.get(2..).unwrap_or_default();
    }
    keep(rest);
    found
}

/// Returns a literal up to its closing quote, unescaped, and the text after it.
fn literal(text: &str, quote: char) -> (String, &str) {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            c if c == quote => break,
            '\\' => match chars.next() {
                Some('n') => out.push('\n'),
                Some('t') => out.push('\t'),
                Some('r') => out.push('\r'),
                Some(other) => out.push(other),
                None => break,
            },
            c => out.push(c),
        }
    }
    (out, chars.as_str())
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Collects all text of a value, except roles of the list.
fn collect_text<'v>(value: &'v Value, key: Option<&str>, out: &mut Vec<&'v str>) {
    match value {
        Value::String(text) if key == Some("role") && super::ROLES.contains(&text.as_str()) => {}
        Value::String(text) => out.push(text),
        Value::Array(items) => items.iter().for_each(|item| collect_text(item, None, out)),
        Value::Object(fields) => {
            for (name, value) in fields {
                out.push(name);
                collect_text(value, Some(name), out);
            }
        }
        _ => {}
    }
}

/// Splits by the marks; `None` if `marked` without its marks differs from `text`.
/// White space has no mark; it is untrusted only between untrusted characters.
fn segments_by_marks(text: &str, marked: &str) -> Option<Vec<Segment>> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut spaces = String::new();
    let mut others = marked.chars();
    for c in text.chars() {
        let other = others.next()?;
        let same = unmarked(other) == c || (other == STAND_IN && c > '\u{1FFFF}');
        if !same {
            return None;
        }
        if c.is_whitespace() {
            spaces.push(c);
            continue;
        }
        let trusted = !is_marked(other) && other != STAND_IN;
        let beside_trusted = trusted || segments.last().is_none_or(|segment| segment.trusted);
        push(&mut segments, std::mem::take(&mut spaces), beside_trusted);
        push(&mut segments, c.to_string(), trusted);
    }
    push(&mut segments, spaces, true);
    others.next().is_none().then_some(segments)
}

fn push(segments: &mut Vec<Segment>, text: String, trusted: bool) {
    if text.is_empty() {
        return;
    }
    match segments.last_mut() {
        Some(last) if last.trusted == trusted => last.text.push_str(&text),
        _ => segments.push(Segment { text, trusted }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_can_be_removed() {
        for c in (0..=0x1FFFF).filter_map(char::from_u32) {
            assert_eq!(unmarked(marked(c)), c);
            assert_eq!(is_marked(marked(c)), !c.is_whitespace());
        }
        assert_eq!(marked('\u{10FFFF}'), STAND_IN);
        assert_eq!(marked('\u{20000}'), STAND_IN);
    }

    #[test]
    fn the_text_of_a_template_is_found() {
        let source = r#"a {{- 'b\n' + x["c'"] -}} d {# 'no' #} {% if y == "}}\"" %}|>{% endif %}"#;
        assert_eq!(own_text(source), ["a", "b", "c'", "d", "}}\"", "|>"]);
        assert_eq!(own_text("{{ 'open"), ["open"]);
        assert_eq!(own_text("{%"), [] as [&str; 0]);
    }

    #[test]
    fn segments_follow_the_marks() {
        let user: String = "hi <b>".chars().map(marked).collect();
        let segments = segments_by_marks("<u> hi <b> <e>", &format!("<u> {user} <e>")).unwrap();
        let expected = [Segment::trusted("<u> "), Segment::untrusted("hi <b>"), Segment::trusted(" <e>")];
        assert_eq!(segments, expected);
        assert_eq!(segments_by_marks("ab", "a"), None);
        assert_eq!(segments_by_marks("a", "ab"), None);
        assert_eq!(segments_by_marks("ab", "ac"), None);
    }
}
