//! Time that an unused model stays loaded, as flags and requests write it: `5m`, `1h30m`, a number of seconds, or a
//! negative value for ever. This is the form of Ollama.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Time that a model stays loaded after its last request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepAlive {
    /// This time. Zero unloads the model as soon as its requests have ended.
    For(Duration),
    /// Until its memory is needed for another model.
    Forever,
}

impl KeepAlive {
    /// Unloads a model as soon as its requests have ended.
    pub(crate) const UNLOAD: KeepAlive = KeepAlive::For(Duration::ZERO);

    /// The texts that are read, for the OpenAPI document: a number, or numbers with units.
    pub(crate) const PATTERN: &str = "^[-+]?([0-9]+\\.?[0-9]*|\\.[0-9]+|\
                                      (([0-9]+\\.?[0-9]*|\\.[0-9]+)(ns|us|\u{b5}s|\u{3bc}s|ms|s|m|h))+)$";

    /// Returns the time for a number of seconds; a negative number is for ever. `None` if it is not a number.
    pub(crate) fn from_seconds(seconds: f64) -> Option<KeepAlive> {
        match seconds {
            seconds if seconds.is_nan() => None,
            seconds if seconds < 0.0 => Some(KeepAlive::Forever),
            // A time that a duration cannot hold does not pass either.
            seconds => Some(Duration::try_from_secs_f64(seconds).map_or(KeepAlive::Forever, KeepAlive::For)),
        }
    }
}

impl FromStr for KeepAlive {
    type Err = String;

    /// Reads a duration such as `90s`, `5m` or `1h30m`, or a number of seconds.
    fn from_str(text: &str) -> Result<KeepAlive, String> {
        let expected = || "expected a duration such as 5m or 1h30m, a number of seconds, or -1 for ever".to_owned();
        // Go, whose durations these are, has no exponents and no infinity.
        let is_plain = |c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | '+');
        if let (true, Ok(seconds)) = (text.chars().all(is_plain), text.parse::<f64>()) {
            return KeepAlive::from_seconds(seconds).ok_or_else(expected);
        }
        let (sign, mut rest) = match text.strip_prefix('-') {
            Some(rest) => (-1.0, rest),
            None => (1.0, text.strip_prefix('+').unwrap_or(text)),
        };
        let mut seconds = 0.0;
        if rest.is_empty() {
            return Err(expected());
        }
        while !rest.is_empty() {
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(expected)?;
            let count: f64 = rest[..end].parse().map_err(|_| expected())?;
            rest = &rest[end..];
            let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
            let unit = match &rest[..end] {
                "ns" => 1e-9,
                // Two letters of the same shape: the micro sign and the Greek mu.
                "us" | "\u{b5}s" | "\u{3bc}s" => 1e-6,
                "ms" => 1e-3,
                "s" => 1.0,
                "m" => 60.0,
                "h" => 3600.0,
                _ => return Err(expected()),
            };
            seconds += count * unit;
            rest = &rest[end..];
        }
        KeepAlive::from_seconds(sign * seconds).ok_or_else(expected)
    }
}

impl fmt::Display for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeepAlive::For(time) => write!(f, "{} s", time.as_secs_f64()),
            KeepAlive::Forever => f.write_str("for ever"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_in_the_form_of_ollama() {
        let seconds = |seconds: f64| Ok(KeepAlive::For(Duration::from_secs_f64(seconds)));
        for (text, expected) in [
            ("5m", seconds(300.0)),
            ("1h30m", seconds(5400.0)),
            ("1.5s", seconds(1.5)),
            ("20ms", seconds(0.02)),
            ("0", seconds(0.0)),
            ("0s", seconds(0.0)),
            ("90", seconds(90.0)),
            ("-1", Ok(KeepAlive::Forever)),
            ("-5m", Ok(KeepAlive::Forever)),
            ("+5.m", seconds(300.0)),
            (".5h", seconds(1800.0)),
            ("5\u{b5}s", seconds(5e-6)),
            ("5\u{3bc}s", seconds(5e-6)),
            (&"9".repeat(300), Ok(KeepAlive::Forever)),
            (&"9".repeat(400), Ok(KeepAlive::Forever)),
        ] {
            assert_eq!(text.parse(), expected, "{text}");
        }
        for text in ["", "-", "m", "5 m", "5x", "five", "1h30", "NaN", "1..5s", ".", ".s", "+-5", "5m-3m", "1e5", "inf"]
        {
            assert!(text.parse::<KeepAlive>().is_err(), "{text}");
        }
    }
}
