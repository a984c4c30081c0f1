//! Replies with thoughts under a budget and a grammar for the answer, chosen at random among the allowed tokens.

use std::sync::Arc;

use pellucid_engine::TenantId;
use pellucid_generate::{
    Channels, GrammarSource, MarkerTokens, ReplyPart, ReplySplitter, ThoughtConstraint, ThoughtMarkers,
};
use pellucid_sampling::{TokenConstraint, TokenMatcher, philox};
use pellucid_tokenizer::{TokenKind, Tokenizer};

use crate::support;

/// Formats whose markers are single tokens, several tokens, and headings.
fn formats() -> Vec<ThoughtMarkers> {
    let channels = Channels {
        turn: "<|start|>bot".into(),
        answers: vec!["<|lstrip|>out:".into()],
        answer_end: "<|rstrip|>".into(),
    };
    let headed = ThoughtMarkers { channels: Some(channels), ..ThoughtMarkers::new("<|lstrip|>in:", "<|rstrip|>") };
    vec![ThoughtMarkers::new("<tool>", "</tool>"), ThoughtMarkers::new("<think>", "</think>"), headed]
}

struct Walk {
    matcher: Box<dyn TokenMatcher>,
    tokens: Vec<u32>,
    seed: u64,
    vocab_size: usize,
}

impl Walk {
    fn mask(&mut self) -> Vec<u32> {
        let mut words = vec![0; self.vocab_size.div_ceil(32)];
        if self.matcher.allows_all() {
            words.fill(u32::MAX);
        } else {
            self.matcher.mask(&mut words).unwrap();
        }
        words
    }

    /// Chooses a token among the allowed ones; one of `liked` half of the time, if one of them is allowed.
    fn step(&mut self, liked: &[u32]) -> u32 {
        let mask = self.mask();
        let is_allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        let allowed: Vec<u32> = (0..self.vocab_size as u32).filter(is_allowed).collect();
        let liked: Vec<u32> = liked.iter().copied().filter(is_allowed).collect();
        let [a, b, ..] = philox([self.seed as u32, 7], [self.tokens.len() as u32, 0, 0, 0]);
        let from = if a % 2 == 0 && !liked.is_empty() { &liked } else { &allowed };
        assert!(!from.is_empty(), "no token is allowed behind {:?}", self.tokens);
        let token = from[b as usize % from.len()];
        self.matcher.accept(token).unwrap();
        self.tokens.push(token);
        token
    }
}

/// Splits the tokens of a reply into thoughts and answer, as its reader does.
fn split(tokens: &[u32], markers: &ThoughtMarkers, is_open: bool, tokenizer: &Tokenizer) -> (String, String) {
    let mut splitter = ReplySplitter::default().with_thoughts(markers.clone(), is_open);
    let (mut thoughts, mut answer) = (String::new(), String::new());
    let mut take = |part| match part {
        ReplyPart::Thought(text) => thoughts.push_str(&text),
        ReplyPart::Answer(text) => answer.push_str(&text),
        ReplyPart::Call(_) => unreachable!(),
    };
    for &id in tokens {
        let token = tokenizer.token(id).unwrap();
        let text = String::from_utf8_lossy(&token.bytes);
        splitter.push(&text, token.kind == TokenKind::Control).into_iter().for_each(&mut take);
    }
    splitter.finish().into_iter().for_each(take);
    (thoughts, answer)
}

/// Counts the tokens between the opening and the first closing marker.
fn thought_tokens(tokens: &[u32], markers: &ThoughtMarkers, is_open: bool, tokenizer: &Tokenizer) -> usize {
    let text_of = |tokens: &[u32]| tokenizer.decode(tokens, false);
    let opens = |&end: &usize| text_of(&tokens[..end]).trim_start().starts_with(&markers.open);
    let first = if is_open { Some(0) } else { (1..tokens.len()).find(opens) };
    let Some(first) = first else { return 0 };
    let rest = &tokens[first..];
    let Some(close) = text_of(rest).find(&markers.close) else { return rest.len() };
    (1..=rest.len()).take_while(|&end| text_of(&rest[..end]).len() <= close).count()
}

#[test]
fn thoughts_end_at_their_budget_and_answers_satisfy_their_grammar() {
    let model = support::model();
    let tokenizer = model.tokenizer.clone();
    let grammar = model.grammar(TenantId(0), GrammarSource::Regex("[0-9]{3}(ab)?!".into())).unwrap();
    let (mut num_forced, mut most_thoughts) = (0, 0);
    for (markers, is_open) in formats().into_iter().flat_map(|markers| [(markers.clone(), true), (markers, false)]) {
        let tokens = Arc::new(MarkerTokens::new(markers.clone(), tokenizer.clone(), model.vocab_size));
        let texts = [markers.open.clone(), markers.close.clone(), markers.closing_text(), "<".into(), "\n".into()];
        let liked: Vec<u32> = texts.iter().flat_map(|text| tokenizer.encode_special(text)).collect();
        for (seed, budget) in (0..60).zip([0, 1, 2, 5, 20].into_iter().cycle()) {
            let constraint = ThoughtConstraint {
                tokens: tokens.clone(),
                is_open,
                budget: Some(budget),
                answer: Some(grammar.clone()),
            };
            let mut walk =
                Walk { matcher: constraint.matcher(), tokens: Vec::new(), seed, vocab_size: model.vocab_size };
            let mut num_ahead = 0;
            while !walk.matcher.is_complete() {
                let forced = walk.matcher.forced().to_vec();
                let token = walk.step(&liked);
                if let Some(&first) = forced.first() {
                    assert_eq!(token, first, "a forced token is the only one");
                    num_forced += 1;
                }
                num_ahead += 1;
                assert!(num_ahead < 200, "{:?}", tokenizer.decode(&walk.tokens, false));
                check_rollback(&mut walk, &constraint);
            }
            let (thoughts, answer) = split(&walk.tokens, &markers, is_open, &tokenizer);
            let text = tokenizer.decode(&walk.tokens, false);
            let digits = answer.trim_end_matches('!').trim_end_matches("ab");
            let is_match = answer.ends_with('!') && digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit());
            assert!(is_match, "{answer:?} of {text:?}");
            // The line break before the closing marker is forced, and a token of its own.
            let num_thought = thought_tokens(&walk.tokens, &markers, is_open, &tokenizer);
            assert!(num_thought <= budget + 1, "{num_thought} tokens of {thoughts:?} in {text:?}");
            most_thoughts = most_thoughts.max(num_thought);
        }
    }
    assert!(most_thoughts > 10);
    assert!(num_forced > 100, "{num_forced}");
}

/// Takes tokens back and accepts them again: the masks are the same, and the same as those of a new matcher.
fn check_rollback(walk: &mut Walk, constraint: &ThoughtConstraint) {
    let num_back = (walk.tokens.len() % 5).min(walk.tokens.len());
    let kept = walk.tokens.len() - num_back;
    let now = walk.mask();
    walk.matcher.rollback(num_back).unwrap();
    let mut fresh = Walk { matcher: constraint.matcher(), tokens: Vec::new(), seed: 0, vocab_size: walk.vocab_size };
    walk.tokens[..kept].iter().for_each(|&token| fresh.matcher.accept(token).unwrap());
    assert_eq!(walk.mask(), fresh.mask());
    walk.tokens[kept..].iter().for_each(|&token| walk.matcher.accept(token).unwrap());
    assert_eq!(walk.mask(), now);
}

#[test]
fn a_budget_alone_changes_nothing_before_it_is_reached() {
    let tokenizer = support::tokenizer();
    let markers = ThoughtMarkers::new("<tool>", "</tool>");
    let tokens = Arc::new(MarkerTokens::new(markers, tokenizer.clone(), tokenizer.vocab_size()));
    let constraint = ThoughtConstraint { tokens, is_open: true, budget: Some(3), answer: None };
    let mut matcher = constraint.matcher();
    let words = tokenizer.encode(" the and of every valley");
    for &token in &words[..3] {
        assert!(matcher.allows_all() && matcher.may_end() && matcher.forced().is_empty());
        matcher.accept(token).unwrap();
    }
    let closing = tokenizer.encode_special("\n</tool>\n\n");
    assert!(!matcher.allows_all());
    assert_eq!(matcher.forced(), closing);
    assert!(matcher.expected().contains("thinking_budget"), "{}", matcher.expected());
    for &token in &closing {
        assert_eq!(matcher.forced()[0], token);
        matcher.accept(token).unwrap();
    }
    // Thoughts that were ended do not begin again.
    let mut mask = vec![0; tokenizer.vocab_size().div_ceil(32)];
    matcher.mask(&mut mask).unwrap();
    let open = tokenizer.id_of("<tool>").unwrap();
    assert_eq!(mask[open as usize / 32] >> (open % 32) & 1, 0);
    assert_eq!(mask.iter().map(|word| word.count_zeros()).sum::<u32>(), 1);
    matcher.accept(words[3]).unwrap();
    assert!(matcher.allows_all() && matcher.forced().is_empty());
}
