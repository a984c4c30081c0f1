//! Stop strings: the text ends before the stop string that is complete first, and a possible beginning of a stop string
//! is held back until it is decided. The result does not depend on how the text was split into pieces.
//!
//! Runs on text, after [`crate::TextStream`]: a stop string may begin and end anywhere, across tokens and characters.

/// Searches for stop strings in a text that arrives in pieces.
#[derive(Debug, Clone)]
pub struct StopFilter {
    stops: Vec<String>,
    /// Text that is held back because it may be the beginning of a stop string.
    held: String,
    /// Index of the stop string that was found.
    found: Option<usize>,
}

impl StopFilter {
    /// Creates a filter. Empty strings are ignored: they would end the text before its first character.
    pub fn new(stops: &[String]) -> StopFilter {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        StopFilter { stops, held: String::new(), found: None }
    }

    /// Adds a piece of text and returns the text that can be shown now. Returns nothing once a stop string was found.
    pub fn push(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        if let Some((_, at, which)) = self.first() {
            self.found = Some(which);
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let safe = self.held.len() - self.longest_beginning();
        let rest = self.held.split_off(safe);
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.found.is_some()
    }

    /// Returns the end, start and index of the stop string that is complete first; of those with the same end, the
    /// longest.
    fn first(&self) -> Option<(usize, usize, usize)> {
        let find = |(i, stop): (usize, &String)| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at, i));
        self.stops.iter().enumerate().filter_map(find).min()
    }

    /// Returns the stop string that was found.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|which| self.stops[which].as_str())
    }

    /// Bytes that are held back.
    pub fn num_held(&self) -> usize {
        self.held.len()
    }

    /// Returns the held text, for a caller that ignores stop strings for a while (`min_tokens`).
    pub fn release(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Ends the text and returns what was held back.
    pub fn finish(self) -> String {
        self.held
    }

    /// Returns the length of the longest suffix of the held text that is the beginning of a stop string.
    fn longest_beginning(&self) -> usize {
        let longest = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            (1..=most).rev().find(|&len| stop.is_char_boundary(len) && self.held.ends_with(&stop[..len])).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filter(stops: &[&str]) -> StopFilter {
        StopFilter::new(&stops.iter().map(|stop| stop.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn held_text_can_be_released() {
        let mut filter = filter(&["abc"]);
        assert_eq!(filter.push("xab"), "x");
        assert_eq!(filter.release(), "ab");
        assert_eq!(filter.push("c"), "c", "the released text no longer counts towards a stop string");
    }

    #[test]
    fn a_stop_string_across_pieces_is_not_shown() {
        let mut filter = filter(&["\n\nUser:", "END"]);
        assert_eq!(filter.push("Hello\n"), "Hello");
        assert_eq!(filter.push("\nUs"), "");
        assert_eq!(filter.push("er: hi"), "");
        assert_eq!(filter.found(), Some("\n\nUser:"));
        assert_eq!(filter.push("more"), "");
        assert_eq!(filter.finish(), "");
    }

    #[test]
    fn a_partial_stop_string_is_shown_once_it_cannot_complete() {
        let mut filter = filter(&["abcabd", "é!"]);
        assert_eq!(filter.push("abcab"), "");
        assert_eq!(filter.push("c"), "abc");
        assert_eq!(filter.push("xé"), "abcx");
        assert_eq!(filter.push("?"), "é?");
        assert_eq!(filter.push("ab"), "");
        assert_eq!(filter.finish(), "ab");
    }

    #[test]
    fn the_first_to_be_complete_ends_the_text() {
        for pieces in [&["aéb", "é"][..], &["a", "é", "b", "é"], &["aébé"]] {
            let mut filter = filter(&["ébé", "b", "éb"]);
            let shown: String = pieces.iter().map(|piece| filter.push(piece)).collect();
            assert_eq!((shown.as_str(), filter.found()), ("a", Some("éb")));
        }
    }

    proptest! {
        /// For any split into pieces, the shown text is the text before the stop string that is complete first.
        #[test]
        fn pieces_do_not_matter(
            text in "[abé ]{0,40}",
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
            cuts in prop::collection::vec(0usize..5, 0..40),
        ) {
            let mut filter = StopFilter::new(&stops);
            let mut shown = String::new();
            let mut rest = text.as_str();
            for cut in cuts.into_iter().chain(std::iter::repeat(1)) {
                if rest.is_empty() {
                    break;
                }
                let at = rest.char_indices().nth(cut).map_or(rest.len(), |(at, _)| at);
                let (piece, later) = rest.split_at(at);
                shown.push_str(&filter.push(piece));
                rest = later;
            }
            let find = |stop: &String| text.find(stop.as_str()).map(|at| (at + stop.len(), at));
            let first = stops.iter().filter(|stop| !stop.is_empty()).filter_map(find).min();
            prop_assert_eq!(filter.is_stopped(), first.is_some());
            shown.push_str(&filter.finish());
            prop_assert_eq!(shown.as_str(), &text[..first.map_or(text.len(), |(_, at)| at)]);
        }
    }
}
