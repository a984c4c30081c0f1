//! Generations over a running engine: blocking and async readers, stop strings, cancellation, slow readers.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pellucid_engine::{BeamParams, Control, EarlyStopping, Error};
use pellucid_generate::{
    ChatPrompt, Delta, Error as PromptError, Finish, Generation, GenerationEvent, GenerationRequest, LoadedModel,
    PromptRequest,
};
use pellucid_tokenizer::message;

use crate::support::{model, request};

fn submit(model: &LoadedModel, prompt: PromptRequest) -> Generation {
    Generation::submit(model, GenerationRequest::new(prompt)).unwrap()
}

fn text(model: &LoadedModel, max_tokens: usize) -> PromptRequest {
    PromptRequest::text(request(model, "hello", max_tokens))
}

/// Wakes the thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Reads a generation as an async task would.
fn read_async(mut generation: Generation) -> Vec<Delta> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut replies: Vec<Delta> = (0..generation.num_choices()).map(Delta::new).collect();
    loop {
        match generation.poll_event(&mut context) {
            Poll::Ready(Some(Ok(GenerationEvent::Delta(delta)))) => replies[delta.choice].append(delta).unwrap(),
            Poll::Ready(Some(event)) => drop(event.unwrap()),
            Poll::Ready(None) => return replies,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Waits until `is_true`, which asks the engine between its steps.
#[track_caller]
fn until(what: &str, is_true: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn blocking_and_async_readers_get_the_same_text() {
    let model = model();
    let (replies, summary) = submit(&model, text(&model, 50)).into_replies().unwrap();
    assert_eq!(replies[0].finish, Some(Finish::MaxTokens));
    assert_eq!((summary.completion_tokens, summary.finishes), (50, vec![Some(Finish::MaxTokens)]));
    assert!(summary.time_to_first_token.is_some() && summary.time_per_output_token.is_some());
    assert!(!replies[0].text.is_empty());
    assert_eq!(read_async(submit(&model, text(&model, 50)))[0].text, replies[0].text);
}

#[test]
fn a_stop_string_ends_the_reply_before_it() {
    let model = model();
    let whole = submit(&model, text(&model, 60)).into_replies().unwrap().0.remove(0).text;
    let characters: Vec<char> = whole.chars().collect();
    let stop: String = characters[characters.len() / 2..][..3].iter().collect();
    let before = whole.split_once(&stop).unwrap().0;
    let stopping = |min_tokens| {
        let mut prompt = text(&model, 60);
        prompt.request.sampling.min_tokens = min_tokens;
        let request = GenerationRequest { stop: vec![stop.clone()], ..GenerationRequest::new(prompt) };
        Generation::submit(&model, request).unwrap().into_replies().unwrap()
    };
    let (replies, summary) = stopping(0);
    assert_eq!(replies[0].text, before);
    assert_eq!(summary.finishes, [Some(Finish::StopString(stop.clone()))]);
    assert!(summary.completion_tokens < 60);
    // Stop strings that are complete before `min_tokens` are text.
    let (replies, _) = stopping(60);
    assert!(replies[0].text.len() > before.len(), "{:?}", replies[0].text);
}

/// The times of a reply that a stop string ends are those of the engine, not those of a reader who comes late.
#[test]
fn the_times_of_a_stopped_reply_do_not_depend_on_its_reader() {
    let model = model();
    let whole = submit(&model, text(&model, 40)).into_replies().unwrap().0.remove(0).text;
    let stop: String = whole.chars().skip(20).take(3).collect();
    let request = GenerationRequest { stop: vec![stop.clone()], ..GenerationRequest::new(text(&model, 40)) };
    let generation = Generation::submit(&model, request).unwrap();
    until("the engine has generated the reply", || model.engine.stats().unwrap().finished_requests == 2);
    const LATE: Duration = Duration::from_millis(300);
    std::thread::sleep(LATE);
    let (_, summary) = generation.into_replies().unwrap();
    assert_eq!(summary.finishes, [Some(Finish::StopString(stop))]);
    let first = summary.time_to_first_token.unwrap();
    assert!(first + summary.decode_time + LATE <= summary.total_time, "{summary:?}");
    assert!(summary.decode_time > Duration::ZERO && summary.time_per_output_token.is_some(), "{summary:?}");
    assert!(summary.prefill_time.unwrap() > Duration::ZERO, "{summary:?}");
}

#[test]
fn a_choice_that_is_stopped_does_not_end_the_others() {
    let model = model();
    let choices = |stop: Vec<String>| {
        let mut prompt = text(&model, 60);
        (prompt.request.num_choices, prompt.request.best_of) = (2, 2);
        let request = GenerationRequest { stop, ..GenerationRequest::new(prompt) };
        Generation::submit(&model, request).unwrap().into_replies().unwrap().0
    };
    let whole = choices(Vec::new());
    // A text that only the first reply contains.
    let characters: Vec<char> = whole[0].text.chars().collect();
    let windows = characters.windows(4).map(|window| window.iter().collect::<String>());
    let stop = windows.skip(5).find(|stop| !whole[1].text.contains(stop)).unwrap();
    let stopped = choices(vec![stop.clone()]);
    assert_eq!(stopped[0].finish, Some(Finish::StopString(stop)));
    assert!(stopped[0].text.len() < whole[0].text.len());
    assert_eq!((&stopped[1].text, &stopped[1].finish), (&whole[1].text, &Some(Finish::MaxTokens)));
}

#[test]
fn dropping_a_generation_cancels_its_requests() {
    let model = model();
    let mut generation = submit(&model, text(&model, 1000));
    generation.next().unwrap().unwrap();
    drop(generation);
    until("the request is cancelled", || model.engine.stats().unwrap().cancelled_requests == 1);
    let stats = model.engine.stats().unwrap();
    assert_eq!((stats.num_running, stats.blocks_in_use), (0, 0));
}

#[test]
fn a_slow_reader_holds_up_only_its_own_request() {
    let model = model();
    let slow = submit(&model, text(&model, 1000));
    // While nobody reads the first generation, others run to their end; the engine takes many steps for them.
    for _ in 0..4 {
        submit(&model, text(&model, 200)).into_replies().unwrap();
    }
    let generated = |tokens: u64| tokens - 4 * 199;
    let held_up = generated(model.engine.stats().unwrap().decode_tokens);
    assert!((1..=70).contains(&held_up), "{held_up} tokens for a reader that reads none of them");
    // Reading lets it go on, and nothing is lost.
    let (replies, summary) = slow.into_replies().unwrap();
    assert_eq!((&replies[0].finish, summary.completion_tokens), (&Some(Finish::MaxTokens), 1000));
}

#[test]
fn controls_are_acknowledged_in_order() {
    let model = model();
    let mut generation = submit(&model, text(&model, 200));
    generation.control(0, Control::Pause);
    generation.control(0, Control::Resume);
    let mut num_applied = 0;
    for event in &mut generation {
        num_applied += usize::from(matches!(event.unwrap(), GenerationEvent::ControlApplied { prompt: 0, .. }));
    }
    assert_eq!(num_applied, 2);
    assert_eq!(generation.summary().completion_tokens, 200);
}

#[test]
fn progress_of_the_prompt_is_reported_where_it_is_wanted() {
    let model = model();
    let long = "many words ".repeat(60);
    let prompt = PromptRequest::text(request(&model, &long, 1));
    let num_prompt = prompt.request.prompt.len();
    let submit = |reports_progress| {
        let request = GenerationRequest { reports_progress, ..GenerationRequest::new(prompt.clone()) };
        let events = Generation::submit(&model, request).unwrap().map(Result::unwrap);
        events
            .filter(|event| matches!(event, GenerationEvent::PromptProgress { total, .. } if *total == num_prompt))
            .count()
    };
    assert!(submit(true) > 0);
    assert_eq!(submit(false), 0);
}

#[test]
fn several_prompts_count_their_choices_through() {
    let model = model();
    let echoed = PromptRequest { echo: Some("hello".into()), ..text(&model, 5) };
    let request = GenerationRequest { prompts: vec![text(&model, 5), echoed], ..GenerationRequest::default() };
    let (replies, summary) = Generation::submit(&model, request).unwrap().into_replies().unwrap();
    assert_eq!(replies[1].text, format!("hello{}", replies[0].text));
    assert_eq!((replies[1].choice, summary.completion_tokens, summary.finishes.len()), (1, 10, 2));
}

#[test]
fn beams_are_returned_with_their_scores() {
    let model = model();
    let mut prompt = text(&model, 8);
    let beams = BeamParams { width: 3, num_returned: 2, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic };
    prompt.request.beams = Some(beams);
    let (replies, _) = submit(&model, prompt).into_replies().unwrap();
    assert_eq!(replies.len(), 2);
    assert!(replies[0].score >= replies[1].score && replies[1].score.is_some());
}

#[test]
fn a_request_that_the_engine_refuses_is_an_error() {
    let model = model();
    let mut prompt = text(&model, 5);
    prompt.request.prompt.clear();
    let refused = Generation::submit(&model, GenerationRequest::new(prompt));
    assert_eq!(refused.map(drop), Err(Error::EmptyPrompt));
}

#[test]
fn prompts_are_rendered_and_encoded_in_one_place() {
    let model = model();
    let prompts = model.prompts();
    let messages = [message("developer", "be brief"), message("user", "hi")];
    let rendered = prompts.render(&ChatPrompt::new(&messages)).unwrap();
    let text: String = rendered.iter().map(|segment| segment.text.as_str()).collect();
    // The template has no role `developer`.
    assert_eq!(text, "system: be brief\nuser: hi\nassistant:");
    assert_eq!(prompts.encode_chat(&ChatPrompt::new(&messages)).unwrap(), model.tokenizer.encode_segments(&rendered));
    assert!(!prompts.accepts_variable("messages") && !prompts.accepts_variable("enable_thinking"));
    // A context of 0 tokens holds no text, whatever the vocabulary.
    let refused = prompts.within(0).encode_text("x");
    assert!(matches!(refused, Err(PromptError::PromptTooLong { context_len: 0, .. })), "{refused:?}");
}
