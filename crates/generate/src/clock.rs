//! Date and time in UTC, for chat templates that write the date and for files that record it.

use std::time::{SystemTime, UNIX_EPOCH};

use pellucid_tokenizer::DateTime;

const SECONDS_PER_DAY: u64 = 86_400;

/// Returns the current date and time. A system clock before 1970 is broken and gives 1970.
pub fn utc_now() -> DateTime {
    utc_at(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Returns the date and time that is `seconds` after the beginning of 1970.
pub fn utc_at(seconds: u64) -> DateTime {
    let (mut days, of_day) = (seconds / SECONDS_PER_DAY, seconds % SECONDS_PER_DAY);
    let mut year = 1970;
    while days >= days_in_year(year) {
        days -= days_in_year(year);
        year += 1;
    }
    let mut month = 0;
    while days >= days_in_month(year, month) {
        days -= days_in_month(year, month);
        month += 1;
    }
    DateTime {
        year: year as i32,
        month: month as u8 + 1,
        day: days as u8 + 1,
        hour: (of_day / 3600) as u8,
        minute: (of_day / 60 % 60) as u8,
        second: (of_day % 60) as u8,
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

/// `month` counts from 0.
fn days_in_month(year: u64, month: usize) -> u64 {
    const DAYS: [u64; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    DAYS[month] + u64::from(month == 1 && is_leap(year))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        let date = |seconds| {
            let at = utc_at(seconds);
            (at.year, at.month, at.day, at.hour, at.minute, at.second)
        };
        assert_eq!(date(0), (1970, 1, 1, 0, 0, 0));
        assert_eq!(date(951_782_399), (2000, 2, 28, 23, 59, 59));
        assert_eq!(date(951_782_400), (2000, 2, 29, 0, 0, 0));
        assert_eq!(date(1_234_567_890), (2009, 2, 13, 23, 31, 30));
        assert_eq!(date(4_102_444_800), (2100, 1, 1, 0, 0, 0));
    }
}
