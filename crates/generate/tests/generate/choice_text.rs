//! The text of a choice: half characters and stop strings are held back, tokens are released with their text.

use std::sync::Arc;

use pellucid_engine::TokenEvent;
use pellucid_generate::{ChoiceText, Delta, Finish, PartKind, ReplySplitter, ReplyToken, TextRules, ThoughtMarkers};
use pellucid_sampling::Logprobs;
use pellucid_tokenizer::{TextStream, Tokenizer};

use crate::support;

fn choice(tokenizer: &Arc<Tokenizer>, stop: &[&str], min_tokens: usize, reports_logprobs: bool) -> ChoiceText {
    let stop: Vec<String> = stop.iter().map(|stop| stop.to_string()).collect();
    let rules = TextRules { stop: &stop, min_tokens, reports_logprobs, reports_ids: true, splitter: None };
    ChoiceText::new(0, TextStream::new(tokenizer.clone(), true), rules)
}

fn event(id: u32) -> TokenEvent {
    TokenEvent {
        choice: 0,
        id,
        logprobs: Some(Logprobs { chosen: -1.0, top: Vec::new() }),
        trace: None,
        proposal: None,
        batch_size: 1,
    }
}

/// The ids of a text, one for each byte.
fn bytes(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let is_byte = |id: &u32, byte: u8| tokenizer.token(*id).is_some_and(|token| *token.bytes == [byte]);
    let id = |byte| (0..tokenizer.vocab_size() as u32).find(|id| is_byte(id, byte)).unwrap();
    text.bytes().map(id).collect()
}

/// Pushes a text byte by byte; returns what each byte released.
fn push(choice: &mut ChoiceText, tokenizer: &Tokenizer, text: &str) -> Vec<Delta> {
    bytes(tokenizer, text).into_iter().map(|id| choice.push(event(id))).collect()
}

fn texts(deltas: &[Delta]) -> Vec<&str> {
    deltas.iter().map(|delta| delta.text.as_str()).collect()
}

#[test]
fn half_a_character_is_held_back() {
    let tokenizer = support::tokenizer();
    let mut choice = choice(&tokenizer, &[], 0, false);
    assert_eq!(texts(&push(&mut choice, &tokenizer, "né😀")), ["n", "", "é", "", "", "", "😀"]);
    // A character that is never completed is replaced at the end.
    choice.push(event(bytes(&tokenizer, "é")[0]));
    let delta = choice.end(Finish::MaxTokens);
    assert_eq!((delta.text.as_str(), delta.finish), ("\u{fffd}", Some(Finish::MaxTokens)));
}

#[test]
fn a_stop_string_is_held_back_and_ends_the_text() {
    let tokenizer = support::tokenizer();
    let mut choice = choice(&tokenizer, &["END"], 0, false);
    let deltas = push(&mut choice, &tokenizer, "aENxENDb");
    assert_eq!(texts(&deltas), ["a", "", "", "ENx", "", "", "", ""]);
    assert_eq!(deltas[6].finish, Some(Finish::StopString("END".into())));
    assert!(deltas[7].is_empty(), "tokens after the end are ignored");
    assert_eq!(choice.num_tokens(), 7);
    assert!(choice.end(Finish::MaxTokens).is_empty(), "a choice ends once");
    assert_eq!(choice.finish(), Some(&Finish::StopString("END".into())));
}

#[test]
fn the_beginning_of_a_stop_string_is_text_at_the_end() {
    let tokenizer = support::tokenizer();
    let mut choice = choice(&tokenizer, &["END"], 0, false);
    assert_eq!(texts(&push(&mut choice, &tokenizer, "aEN")), ["a", "", ""]);
    assert_eq!(choice.end(Finish::EndToken(None)).text, "EN");
}

#[test]
fn a_cancelled_choice_shows_what_was_held_back() {
    let tokenizer = support::tokenizer();
    let mut choice = choice(&tokenizer, &["END"], 0, false);
    push(&mut choice, &tokenizer, "aEN");
    assert_eq!(choice.flush().text, "EN");
    assert_eq!(choice.finish(), None);
}

#[test]
fn stop_strings_take_effect_from_min_tokens_on() {
    let tokenizer = support::tokenizer();
    let mut choice = choice(&tokenizer, &["b"], 3, false);
    let deltas = push(&mut choice, &tokenizer, "abbb");
    assert_eq!(texts(&deltas), ["a", "b", "", ""]);
    assert_eq!(deltas[2].finish, Some(Finish::StopString("b".into())), "the third token is the first that may end it");
}

#[test]
fn raising_min_tokens_in_flight_releases_what_was_held_back() {
    let tokenizer = support::tokenizer();
    let mut choice = choice(&tokenizer, &["END"], 0, false);
    assert_eq!(texts(&push(&mut choice, &tokenizer, "EN")), ["", ""]);
    choice.set_min_tokens(10);
    assert_eq!(texts(&push(&mut choice, &tokenizer, "D!")), ["END", "!"]);
}

#[test]
fn log_probabilities_are_released_with_their_text() {
    let tokenizer = support::tokenizer();
    let mut choice = choice(&tokenizer, &["END"], 0, true);
    let offsets = |delta: &Delta| delta.tokens.iter().map(|token| token.offset).collect::<Vec<_>>();
    let deltas = push(&mut choice, &tokenizer, "aéENx");
    let released: Vec<Vec<usize>> = deltas.iter().map(offsets).collect();
    // The first byte of é has no text of its own: it is released with the second, at the same offset.
    assert_eq!(released, [vec![0], vec![], vec![1, 1], vec![], vec![], vec![2, 3, 4]]);
    // Tokens of a stop string have no text in the reply, so they are not reported.
    let deltas = push(&mut choice, &tokenizer, "END");
    assert!(deltas.iter().all(|delta| delta.tokens.is_empty()));
    assert!(deltas[2].finish.is_some());
}

#[test]
fn ids_are_released_with_their_text() {
    let tokenizer = support::tokenizer();
    let mut ended = choice(&tokenizer, &["END"], 0, false);
    let text = bytes(&tokenizer, "aéENx");
    let released: Vec<Vec<u32>> = push(&mut ended, &tokenizer, "aéENx").into_iter().map(|delta| delta.ids).collect();
    assert_eq!(released, [&text[..1], &[], &text[1..3], &[], &[], &text[3..]]);
    // The token that ends the choice has no text and is its last id.
    let rest = bytes(&tokenizer, "EN");
    assert!(push(&mut ended, &tokenizer, "EN").iter().all(Delta::is_empty));
    assert_eq!(ended.end(Finish::EndToken(Some(3))).ids, [rest[0], rest[1], 3]);
    // Tokens of a stop string have no text in the reply, so they are not reported.
    let mut stopped = choice(&tokenizer, &["END"], 0, false);
    let deltas = push(&mut stopped, &tokenizer, "aEND");
    assert_eq!(deltas.into_iter().flat_map(|delta| delta.ids).collect::<Vec<_>>(), bytes(&tokenizer, "a"));
    assert!(stopped.end(Finish::EndToken(Some(3))).ids.is_empty());
}

#[test]
fn an_echo_moves_the_offsets() {
    let tokenizer = support::tokenizer();
    let mut choice = choice(&tokenizer, &[], 0, true);
    assert_eq!(choice.echo("né".into(), Vec::new()).text, "né");
    assert_eq!(push(&mut choice, &tokenizer, "x")[0].tokens[0].offset, 2);
}

/// SentencePiece models write a word with the space before it, and the text of a reply drops the first one.
#[test]
fn the_tokens_of_a_sentencepiece_reply_join_to_its_text() {
    for (name, text) in [("llama2", "Hello world"), ("mistral", "a cat"), ("xglm", "the house"), ("gemma", "a cat")] {
        let tokenizer = support::tokenizer_of(name);
        let mut choice = choice(&tokenizer, &[], 0, true);
        let mut whole = Delta::new(0);
        for id in tokenizer.encode(text) {
            whole.append(choice.push(event(id))).unwrap();
        }
        whole.append(choice.end(Finish::MaxTokens)).unwrap();
        assert_eq!(whole.text, text, "{name}");
        let shown = |token: &ReplyToken| tokenizer.shown_bytes(token.id, token.at_start).into_owned();
        let joined: Vec<u8> = whole.tokens.iter().flat_map(shown).collect();
        assert_eq!(String::from_utf8(joined).unwrap(), text, "{name}");
        assert_eq!(whole.tokens.iter().filter(|token| token.at_start).count(), 1, "{name}");
    }
}

/// Splits a reply whose markers are spelled with several tokens; returns it whole and its count of thought tokens.
fn thinking(reply: &str, markers: ThoughtMarkers, is_open: bool) -> (Delta, usize) {
    let tokenizer = support::tokenizer();
    let splitter = ReplySplitter::default().with_thoughts(markers, is_open);
    let (stop, splitter) = (["stop".into()], Some(&splitter));
    let rules = TextRules { stop: &stop, min_tokens: 0, reports_logprobs: true, reports_ids: true, splitter };
    let mut choice = ChoiceText::new(0, TextStream::new(tokenizer.clone(), true), rules);
    let mut whole = Delta::new(0);
    for id in tokenizer.encode_special(reply) {
        whole.append(choice.push(event(id))).unwrap();
    }
    whole.append(choice.end(Finish::EndToken(None))).unwrap();
    (whole, choice.num_thought_tokens())
}

#[test]
fn tokens_belong_to_thoughts_or_to_the_answer() {
    let tokenizer = support::tokenizer();
    let markers = ThoughtMarkers::new("<think>", "</think>");
    let text_of = |whole: &Delta, part: PartKind| -> String {
        let ids: Vec<u32> = whole.tokens.iter().filter(|token| token.part == part).map(|token| token.id).collect();
        tokenizer.decode(&ids, false)
    };
    for (reply, is_open, thoughts, answer) in [
        ("<think>\nstop is </thin\n</think>\n\nIt is <think>.", false, "stop is </thin", "It is <think>."),
        ("every valley</think>Hello", true, "every valley", "Hello"),
        ("<thin Hello", false, "", "<thin Hello"),
        ("<think>every valley</thin", false, "every valley</thin", ""),
    ] {
        let (whole, num_thought_tokens) = thinking(reply, markers.clone(), is_open);
        assert_eq!((whole.thoughts.as_str(), whole.text.as_str()), (thoughts, answer), "{reply:?}");
        // The tokens of the answer are its text; all others, markers included, are those of the thoughts.
        let rest = reply.len() - answer.len();
        assert_eq!(text_of(&whole, PartKind::Answer), answer, "{reply:?}");
        assert_eq!(text_of(&whole, PartKind::Thought), reply[..rest], "{reply:?}");
        let is_thought = |token: &&ReplyToken| token.part == PartKind::Thought;
        assert_eq!(num_thought_tokens, whole.tokens.iter().filter(is_thought).count(), "{reply:?}");
    }
    // A stop string ends the answer, not the thoughts.
    let (whole, _) = thinking("<think>stop</think>every stop valley", markers, false);
    assert_eq!((whole.thoughts.as_str(), whole.text.as_str()), ("stop", "every "));
    assert_eq!(whole.finish, Some(Finish::StopString("stop".into())));
}
