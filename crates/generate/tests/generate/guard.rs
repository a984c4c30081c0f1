//! Guards over a running engine: nothing of a blocked span is returned, and the prefix cache stays clean.

use std::sync::Arc;
use std::time::Duration;

use pellucid_generate::{
    Delta, Finish, Generation, GenerationEvent, GenerationRequest, Guard, GuardError, Guards, LoadedModel, ModelGuard,
    OnGuardError, PatternGuard, PromptRequest, PromptText, Refusal, ReplyText, ReplyTrace, SEGMENT_CHARACTERS, Summary,
    TokenVerdict, Verdict, VerdictFormat, VerdictKind,
};

use crate::support::{model, request};

fn guarded(patterns: &str) -> LoadedModel {
    let guard = PatternGuard::parse(patterns).unwrap();
    LoadedModel { guards: Guards::new(vec![Arc::new(guard)], OnGuardError::Closed), ..model() }
}

fn submit(model: &LoadedModel, prompt: PromptRequest) -> Generation {
    let mut request = GenerationRequest::new(prompt);
    model.judge(&mut request).unwrap();
    Generation::submit(model, request).unwrap()
}

fn reply(model: &LoadedModel, prompt: PromptRequest) -> (Vec<Delta>, Summary) {
    submit(model, prompt).into_replies().unwrap()
}

/// A prompt whose reply reports log probabilities and traces.
fn prompt(model: &LoadedModel) -> PromptRequest {
    let mut prompt = PromptRequest::text(request(model, "hello", 60));
    prompt.request.sampling.logprobs = Some(2);
    prompt.request.trace = true;
    prompt
}

/// Returns `len` characters from the middle of a text as a regular expression, and the text before them.
fn phrase(text: &str, len: usize) -> (String, &str) {
    let from = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let phrase: String = text[from..].chars().take(len).collect();
    let expression = phrase.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
    (expression, text.split_once(&phrase).unwrap().0)
}

#[test]
fn nothing_of_a_blocked_span_is_returned() {
    let plain = model();
    let whole = reply(&plain, prompt(&plain)).0.remove(0);
    let (expression, before) = phrase(&whole.text, 4);
    let model = guarded(&format!("(?-i){expression}"));
    let (replies, summary) = reply(&model, prompt(&model));
    let blocked = &replies[0];
    // Tokens are shown or blocked as a whole, so the text ends before the token in which the phrase begins.
    assert!(before.starts_with(&blocked.text) && before.len() < blocked.text.len() + 8, "{:?}", blocked.text);
    assert_eq!(blocked.finish, Some(Finish::ContentFilter { guard: "patterns", rule: "line 1".into() }));
    assert_eq!(blocked.tokens, whole.tokens[..blocked.tokens.len()], "log probabilities of shown tokens are the same");
    assert!(blocked.tokens.len() < whole.tokens.len() && blocked.traces.len() == blocked.tokens.len());
    let passed = TokenVerdict { guard: "patterns", kind: VerdictKind::ReplyPassed };
    assert!(blocked.traces.iter().all(|trace| trace.verdicts == [passed]), "traces show verdicts");
    assert!(whole.traces.iter().all(|trace| trace.verdicts.is_empty()));
    let shown: usize = blocked.tokens.iter().map(|token| model.tokenizer.decode(&[token.id], true).len()).sum();
    assert!(shown <= before.len(), "no log probability of a blocked token is returned");
    assert!(summary.completion_tokens > blocked.tokens.len() && summary.completion_tokens < 60);
    // A stream has the same pieces, and none of them contains a beginning of the phrase at its end.
    let streamed: String = submit(&model, prompt(&model))
        .filter_map(|event| match event.unwrap() {
            GenerationEvent::Delta(delta) => Some(delta.text),
            _ => None,
        })
        .collect();
    assert_eq!(streamed, blocked.text);
    let counts: Vec<u64> = model.guards.counts().iter().map(|count| count.count).collect();
    assert_eq!(counts, [2, 0, 0, 0, 2, 0]);
}

#[test]
fn a_phrase_in_one_choice_leaves_the_others() {
    let two = |model: &LoadedModel| {
        let mut prompt = PromptRequest::text(request(model, "hello", 60));
        (prompt.request.num_choices, prompt.request.best_of) = (2, 2);
        prompt
    };
    let plain = model();
    let whole = reply(&plain, two(&plain)).0;
    let (expression, before) = phrase(&whole[0].text, 6);
    let model = guarded(&format!("(?-i){expression}"));
    let (replies, summary) = reply(&model, two(&model));
    assert!(before.starts_with(&replies[0].text) && before.len() < replies[0].text.len() + 8);
    assert!(matches!(summary.finishes[0], Some(Finish::ContentFilter { .. })));
    assert_eq!((&replies[1].text, &replies[1].finish), (&whole[1].text, &Some(Finish::MaxTokens)));
}

#[test]
fn a_blocked_prompt_is_refused_and_none_is_submitted_unjudged() {
    let model = guarded("hel+o{1,2}".replace('+', "{1,3}").as_str());
    let mut request = GenerationRequest::new(prompt(&model));
    assert!(Generation::submit(&model, request.clone()).is_err(), "nobody judged the prompt");
    let refusal = model.judge(&mut request).unwrap_err();
    assert_eq!(refusal, Refusal::Blocked { guard: "patterns", rule: "line 1".into() });
    assert_eq!(model.engine.stats().unwrap().steps, 0);
}

#[test]
fn replies_of_guarded_models_do_not_enter_the_prefix_cache() {
    let cached = |model: &LoadedModel| {
        let first = PromptRequest::text(request(model, &"hello".repeat(10), 60));
        let ids = first.request.prompt.clone();
        let (replies, _) = reply(
            model,
            PromptRequest {
                request: pellucid_engine::Request { trace: true, ..first.request.clone() },
                ..first.clone()
            },
        );
        let output = replies[0].traces.iter().map(|trace| trace.token.draw.winner.id);
        let mut again = first;
        again.request.prompt = ids.iter().copied().chain(output).collect();
        (ids.len(), again.request.prompt.len(), reply(model, again).1.cached_tokens)
    };
    let (prompt_len, _, found) = cached(&guarded("never found"));
    assert!(found <= prompt_len && found > 0, "{found} of {prompt_len}");
    // Positive control: without a guard, the reply is found.
    let (prompt_len, whole, found) = cached(&model());
    assert!(found > prompt_len && found < whole);
}

/// A guard that takes its time and judges replies by their length.
#[derive(Debug)]
struct Slow {
    /// Characters from which on a reply is blocked.
    from: usize,
    fails: bool,
}

impl Guard for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn judge_prompt(&self, _: &PromptText) -> Result<Verdict, GuardError> {
        Ok(Verdict::Pass)
    }

    fn judge_reply(&self, prompt: &PromptText, reply: &ReplyText) -> Result<Verdict, GuardError> {
        assert_eq!(prompt.text, "hello");
        std::thread::sleep(Duration::from_millis(2));
        if reply.answer.chars().count() < self.from {
            return Ok(Verdict::Pass);
        }
        if self.fails { Err(GuardError("tired".into())) } else { Ok(Verdict::Block("long".into())) }
    }
}

fn slow(from: usize, fails: bool, on_error: OnGuardError) -> LoadedModel {
    // The patterns in front of it must not change what the slow guard sees.
    let patterns = PatternGuard::parse("never found").unwrap();
    LoadedModel { guards: Guards::new(vec![Arc::new(patterns), Arc::new(Slow { from, fails })], on_error), ..model() }
}

#[test]
fn a_guard_that_judges_segments_blocks_at_the_same_place_however_long_it_takes() {
    let long = |model: &LoadedModel| {
        let mut prompt = PromptRequest::text(request(model, "hello", 1200));
        prompt.request.sampling.logprobs = Some(0);
        prompt
    };
    let plain = model();
    let whole = reply(&plain, long(&plain)).0.remove(0);
    assert!(whole.text.chars().count() > 4 * SEGMENT_CHARACTERS);
    let blocking = slow(2 * SEGMENT_CHARACTERS + 20, false, OnGuardError::Closed);
    let runs: Vec<_> = (0..3).map(|_| reply(&blocking, long(&blocking))).collect();
    for (replies, summary) in &runs {
        let blocked = &replies[0];
        assert!(whole.text.starts_with(&blocked.text));
        let len = blocked.text.chars().count();
        assert!((2 * SEGMENT_CHARACTERS..2 * SEGMENT_CHARACTERS + 20).contains(&len), "{len}");
        assert_eq!(blocked.finish, Some(Finish::ContentFilter { guard: "slow", rule: "long".into() }));
        assert_eq!(blocked.tokens, whole.tokens[..blocked.tokens.len()]);
        assert_eq!((&blocked.text, summary.completion_tokens), (&runs[0].0[0].text, runs[0].1.completion_tokens));
    }
    // A guard that never blocks changes nothing.
    let passing = slow(usize::MAX, false, OnGuardError::Closed);
    let passed = reply(&passing, long(&passing)).0.remove(0);
    assert_eq!((passed.text, passed.tokens, passed.finish), (whole.text, whole.tokens, whole.finish));
}

#[test]
fn a_guard_that_fails_in_a_reply_closes_or_opens() {
    let prompt = |model: &LoadedModel| PromptRequest::text(request(model, "hello", 100));
    let plain = model();
    let whole = reply(&plain, prompt(&plain)).0.remove(0);
    let closed = slow(0, true, OnGuardError::Closed);
    let blocked = reply(&closed, prompt(&closed)).0.remove(0);
    let rule = "the guard failed: tired".into();
    assert_eq!((blocked.text.as_str(), blocked.finish), ("", Some(Finish::ContentFilter { guard: "slow", rule })));
    let open = slow(0, true, OnGuardError::Open);
    let mut traced = prompt(&open);
    traced.request.trace = true;
    let opened = reply(&open, traced).0.remove(0);
    assert_eq!(opened.text, whole.text);
    let verdicts = |trace: &ReplyTrace| trace.verdicts.iter().map(|verdict| verdict.kind.verdict()).collect::<Vec<_>>();
    assert!(!opened.traces.is_empty() && opened.traces.iter().all(|trace| verdicts(trace) == ["passed", "failed"]));
    let failed = |model: &LoadedModel| model.guards.counts().last().unwrap().count;
    assert!(failed(&closed) == 1 && failed(&open) >= 1);
}

#[test]
fn a_model_gives_one_of_two_verdicts() {
    let guard = ModelGuard::new(model(), Duration::from_secs(60)).unwrap();
    assert_eq!(guard.format(), VerdictFormat::Instructed);
    let guarded = LoadedModel { guards: Guards::new(vec![Arc::new(guard)], OnGuardError::Closed), ..model() };
    // The model without weights gives an arbitrary verdict, but one that can be read, and always the same.
    let verdict = || guarded.judge(&mut GenerationRequest::new(prompt(&guarded)));
    let first = verdict();
    assert!(matches!(first, Ok(()) | Err(Refusal::Blocked { guard: "model", .. })), "{first:?}");
    assert_eq!(verdict(), first);
}
