//! The closest known word to one that is misspelled, for "did you mean".

/// Characters of a word that are compared; longer words are not typed by hand.
const MAX_CHARS: usize = 64;

/// Returns the known word closest to `word`, if at most two characters differ, and one in a word of up to four. Case
/// does not count.
pub(crate) fn closest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let word = word.to_lowercase();
    let tolerated = |known: &str| if word.chars().count().min(known.chars().count()) <= 4 { 1 } else { 2 };
    let close = known.into_iter().map(|known| (distance(&word, &known.to_lowercase()), known));
    close.filter(|(distance, known)| *distance <= tolerated(known)).min().map(|(_, known)| known)
}

/// Whether the words differ by at most one character, or by two in the wrong order.
pub(crate) fn is_slip(word: &str, known: &str) -> bool {
    distance(&word.to_lowercase(), &known.to_lowercase()) <= 1
}

/// Returns the number of characters to insert, remove or replace to turn one word into the other; two characters in
/// the wrong order count once.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().take(MAX_CHARS).collect();
    let b: Vec<char> = b.chars().take(MAX_CHARS).collect();
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = match (i, j) {
                (0, other) | (other, 0) => other,
                (i, j) => {
                    let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                    let best = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                    let is_swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                    if is_swapped { best.min(rows[i - 2][j - 2] + 1) } else { best }
                }
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_found_and_another_word_is_not() {
        let known = ["smollm2", "qwen2.5-coder", "tiny", "help", "set"];
        for (word, expected) in [
            ("smolm2", Some("smollm2")),
            ("SmolLM", Some("smollm2")),
            ("qwen25-coder", Some("qwen2.5-coder")),
            ("tiyn", Some("tiny")),
            ("hlep", Some("help")),
            ("hello", None),
            ("time", None),
            ("gravity", None),
            ("", None),
        ] {
            assert_eq!(closest(word, known), expected, "{word}");
        }
        assert_eq!(distance("abc", &"x".repeat(10_000)), MAX_CHARS);
    }
}
