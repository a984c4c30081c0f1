//! Dates for templates: `strftime_now` with the date that the caller gives, because this crate has no clock.

use std::fmt::Write;

/// A date and time for `strftime_now`, in the caller's time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DateTime {
    pub year: i32,
    /// 1 to 12.
    pub month: u8,
    /// 1 to 31.
    pub day: u8,
    pub hour: u8,
    pub minute: u8,
    pub second: u8,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl DateTime {
    /// Returns the days since Sunday, by Sakamoto's method for the Gregorian calendar.
    fn weekday(&self) -> usize {
        const SHIFT: [i64; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let month = usize::from(self.month.clamp(1, 12)) - 1;
        let year = i64::from(self.year) - i64::from(month < 2);
        let days = year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
        (days + SHIFT[month] + i64::from(self.day)).rem_euclid(7) as usize
    }

    /// Formats like C's strftime. A directive that no known template uses is an error.
    pub(super) fn format(&self, format: &str) -> Result<String, String> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next().unwrap_or('%');
            // A dash omits the leading zero.
            let width = if directive == '-' { 1 } else { 2 };
            if directive == '-' {
                directive = chars.next().unwrap_or('%');
            }
            let month = MONTHS[usize::from(self.month.clamp(1, 12)) - 1];
            let weekday = WEEKDAYS[self.weekday()];
            let hour_of_12 = (self.hour + 11) % 12 + 1;
            // Writing to a string cannot fail.
            let _ = match directive {
                'Y' => write!(out, "{}", self.year),
                'y' => write!(out, "{:0width$}", self.year.rem_euclid(100)),
                'm' => write!(out, "{:0width$}", self.month),
                'd' => write!(out, "{:0width$}", self.day),
                'e' => write!(out, "{:2}", self.day),
                'B' => write!(out, "{month}"),
                'b' | 'h' => write!(out, "{}", &month[..3]),
                'A' => write!(out, "{weekday}"),
                'a' => write!(out, "{}", &weekday[..3]),
                'H' => write!(out, "{:0width$}", self.hour),
                'I' => write!(out, "{hour_of_12:0width$}"),
                'M' => write!(out, "{:0width$}", self.minute),
                'S' => write!(out, "{:0width$}", self.second),
                'p' => write!(out, "{}", if self.hour < 12 { "AM" } else { "PM" }),
                'F' => write!(out, "{}-{:02}-{:02}", self.year, self.month, self.day),
                'T' => write!(out, "{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
                '%' => write!(out, "%"),
                other => return Err(format!("strftime_now: %{other} is not supported")),
            };
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_formatted_like_strftime() {
        let date = DateTime { year: 2026, month: 11, day: 5, hour: 15, minute: 4, second: 9 };
        assert_eq!(
            date.format("%d %b %Y|%A %B %-d|%H:%M:%S %I%p|%y-%m-%e%%").unwrap(),
            "05 Nov 2026|Thursday November 5|15:04:09 03PM|26-11- 5%"
        );
        assert!(date.format("%Q").is_err());
    }
}
