//! Formats numbers, sizes and dates for people.

use pellucid_tokenizer::DateTime;

/// Formats a size in decimal units (1 kB is 1000 bytes), as disks and download pages do.
pub(crate) fn bytes_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    // 999.95 would print as 1000.0.
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Formats a number with digits in groups of three: 98362432 is `98,362,432`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count of parameters with three significant digits: 134515008 is `135 M`.
pub(crate) fn count_text(count: u64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")];
    let value = count as f64;
    for (scale, unit) in UNITS {
        if value >= scale {
            let scaled = value / scale;
            let decimals = if scaled < 9.995 {
                2
            } else if scaled < 99.95 {
                1
            } else {
                0
            };
            return format!("{scaled:.decimals$}{unit}");
        }
    }
    count.to_string()
}

/// Escapes control characters and marks that change the writing direction, so that text from a file cannot steer a
/// terminal.
pub(crate) fn escaped(text: &str) -> String {
    let steers = |c: char| {
        c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if steers(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

/// Returns the current time in UTC in the format of RFC 3339: `2026-11-15T03:08:46Z`.
pub(crate) fn utc_now() -> String {
    utc_text(pellucid_generate::utc_now())
}

fn utc_text(at: DateTime) -> String {
    let DateTime { year, month, day, hour, minute, second } = at;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use pellucid_generate::utc_at;

    use super::*;

    #[test]
    fn sizes_and_counts() {
        assert_eq!(bytes_text(999), "999 B");
        assert_eq!(bytes_text(98_362_432), "98.4 MB");
        assert_eq!(bytes_text(999_960), "1.0 MB");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(98_362_432), "98,362,432");
        assert_eq!(count_text(134_515_008), "135 M");
        assert_eq!(count_text(1_543_714_304), "1.54 B");
        assert_eq!(count_text(12), "12");
    }

    #[test]
    fn names_cannot_steer_a_terminal() {
        assert_eq!(escaped("a\u{1b}[31m\nb é 模"), "a\\u{1b}[31m\\nb é 模");
        assert_eq!(escaped("\u{202e}x"), "\\u{202e}x");
    }

    #[test]
    fn dates() {
        assert_eq!(utc_text(utc_at(0)), "1970-01-01T00:00:00Z");
        assert_eq!(utc_text(utc_at(1_794_712_126)), "2026-11-15T03:08:46Z");
    }
}
