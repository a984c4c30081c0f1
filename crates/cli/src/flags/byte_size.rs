//! Parses sizes in bytes as people type them: `2GB`, `512MiB`, `1.5g`, or a number of bytes.

/// Returns the bytes of a size. Decimal units are powers of 1000; units with an `i` are powers of 1024.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("expected a size such as 2GB, 512MiB or 1000000000, found {text:?}");
    let text_lower = text.trim().to_ascii_lowercase();
    let digits = text_lower.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text_lower.len());
    let (number, unit) = text_lower.split_at(digits);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let factor = match unit.trim() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024f64.powi(2),
        "gib" => 1024f64.powi(3),
        "tib" => 1024f64.powi(4),
        _ => return Err(wrong()),
    };
    let bytes = number * factor;
    if (1.0..1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("1", 1), ("2GB", 2_000_000_000), ("512 MiB", 512 << 20), ("1.5g", 1_500_000_000), ("64kib", 65_536)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "0", "-1", "GB", "1XB", "1e30", "nan", "9999999TB", "1.2.3GB"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
