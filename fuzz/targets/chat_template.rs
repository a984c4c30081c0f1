//! A chat template, a zero byte, and the text of messages (one for each line of 0x01).
//!
//! No text of a message becomes a control token, whatever the template does with it. The control token of this target
//! is spelled with characters that the template may not contain, so every one in the prompt comes from a message.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pellucid_fuzz::{CONTROL, TOKENIZER, two_parts};
use pellucid_tokenizer::{ChatTemplate, Conversation, DateTime, message};

const NOW: DateTime = DateTime { year: 2026, month: 11, day: 17, hour: 6, minute: 7, second: 8 };

fuzz_target!(|data: &[u8]| {
    let (source, text) = two_parts(data);
    let (Ok(source), text) = (std::str::from_utf8(source), String::from_utf8_lossy(text)) else { return };
    // A template that writes the characters itself, by an escape or by number, may produce the token.
    let writes_control = source.contains(|c: char| CONTROL.contains(c)) || source.contains(['\\', '%']);
    let Ok(template) = ChatTemplate::compile(source, &TOKENIZER) else { return };
    let roles = ["user", "assistant", "user", "tool", "system"];
    let texts = text.split('\u{1}').take(roles.len());
    let messages: Vec<_> = texts.zip(roles).map(|(text, role)| message(role, text)).collect();
    let conversation =
        Conversation { messages: &messages, tools: None, add_generation_prompt: true, extra: None, now: Some(NOW) };
    let Ok(segments) = template.render(&conversation) else { return };
    let control = TOKENIZER.id_of(CONTROL).expect("a token of the vocabulary");
    let ids = TOKENIZER.encode_segments(&segments);
    assert!(writes_control || !ids.contains(&control), "a message became a control token: {segments:?}");
    for segment in segments.iter().filter(|segment| !segment.trusted) {
        let alone = TOKENIZER.encode_segments(std::slice::from_ref(segment));
        assert!(!alone.contains(&control), "an untrusted segment became a control token: {segment:?}");
    }
});
