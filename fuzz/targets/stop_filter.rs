//! Stop strings, one for each line; a zero byte; a text, divided into pieces at each 0x01.
//!
//! The pieces give the result of the whole text. The text ends before the stop string that is complete first, and no
//! piece that was sent holds the beginning of it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pellucid_fuzz::two_parts;
use pellucid_tokenizer::StopFilter;

/// Returns the end of the text by definition: for each position, whether a stop string ends there; the longest counts.
fn expected<'t>(stops: &[String], text: &'t str) -> (&'t str, bool) {
    for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
        let ends = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()));
        if let Some(longest) = ends.map(String::len).max() {
            return (&text[..end - longest], true);
        }
    }
    (text, false)
}

fuzz_target!(|data: &[u8]| {
    let (stops, text) = two_parts(data);
    let (Ok(stops), Ok(text)) = (std::str::from_utf8(stops), std::str::from_utf8(text)) else { return };
    let stops: Vec<String> = stops.split('\n').map(str::to_owned).collect();
    let whole = text.replace('\u{1}', "");
    let (expected, is_stopped) = expected(&stops, &whole);

    let mut filter = StopFilter::new(&stops);
    let mut shown = String::new();
    for piece in text.split('\u{1}') {
        shown.push_str(&filter.push(piece));
        assert!(expected.starts_with(&shown), "{shown:?} was sent, of {expected:?}");
    }
    assert_eq!(filter.is_stopped(), is_stopped);
    assert_eq!(filter.found().is_some(), is_stopped);
    shown.push_str(&filter.finish());
    assert_eq!(shown, expected);
});
