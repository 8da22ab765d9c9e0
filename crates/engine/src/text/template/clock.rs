//! The date a template may ask for. The time is given from outside, so that a rendering is a function of its inputs.

/// A civil date and time, in whatever zone the caller means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CivilTime {
    year: i64,
    /// 1 to 12.
    month: u32,
    /// 1 to 31.
    day: u32,
    /// Seconds since midnight.
    second_of_day: u32,
    /// Days since 1970-01-01.
    days: i64,
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

impl CivilTime {
    /// From seconds since 1970-01-01 00:00:00, already shifted by the zone's offset where local time is meant.
    /// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
    pub fn from_unix(seconds: i64) -> CivilTime {
        let days = seconds.div_euclid(86_400);
        // Days since 0000-03-01, so that the leap day ends a year; an era is 400 years.
        let z = days + 719_468;
        let era = z.div_euclid(146_097);
        let day_of_era = z.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        CivilTime {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month: month as u32,
            day: (day_of_year - (153 * shifted_month + 2) / 5 + 1) as u32,
            second_of_day: seconds.rem_euclid(86_400) as u32,
            days,
        }
    }

    /// This moment's UTC time by the system clock.
    pub fn now() -> CivilTime {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        CivilTime::from_unix(since.as_secs() as i64)
    }

    /// Python's `strftime` in the C locale. A directive that it does not know stays as it is written, as on Linux.
    pub fn strftime(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len() + 16);
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut ahead = rest.clone();
            let mut directive = ahead.next();
            let padded = directive != Some('-');
            if !padded {
                directive = ahead.next();
            }
            match directive.and_then(|directive| self.directive(directive, padded)) {
                Some(text) => {
                    out.push_str(&text);
                    rest = ahead;
                }
                None => out.push('%'),
            }
        }
        out
    }

    fn directive(&self, directive: char, padded: bool) -> Option<String> {
        let number = |value: i64, width: usize| {
            if padded { format!("{value:0width$}") } else { value.to_string() }
        };
        let spaced = |value: u32| if padded { format!("{value:2}") } else { value.to_string() };
        let (hour, minute, second) =
            (self.second_of_day / 3600, self.second_of_day / 60 % 60, self.second_of_day % 60);
        let hour12 = (hour + 11) % 12 + 1;
        let weekday = (self.days + 4).rem_euclid(7); // 1970-01-01 was a Thursday
        let day_of_year = self.days - days_before_year(self.year);
        let weekday_name = WEEKDAYS[weekday as usize];
        let month_name = MONTHS[self.month as usize - 1];
        Some(match directive {
            'Y' => self.year.to_string(),
            'C' => number(self.year.div_euclid(100), 2),
            'y' => number(self.year.rem_euclid(100), 2),
            'm' => number(self.month.into(), 2),
            'd' => number(self.day.into(), 2),
            'e' => spaced(self.day),
            'j' => number(day_of_year + 1, 3),
            'H' => number(hour.into(), 2),
            'I' => number(hour12.into(), 2),
            'k' => spaced(hour),
            'l' => spaced(hour12),
            'M' => number(minute.into(), 2),
            'S' => number(second.into(), 2),
            'f' => "000000".to_owned(),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'A' => weekday_name.to_owned(),
            'a' => weekday_name[..3].to_owned(),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'w' => weekday.to_string(),
            'u' => (if weekday == 0 { 7 } else { weekday }).to_string(),
            'U' => number((day_of_year + 7 - weekday) / 7, 2),
            'W' => number((day_of_year + 7 - (weekday + 6) % 7) / 7, 2),
            'D' | 'x' => self.strftime("%m/%d/%y"),
            'F' => self.strftime("%Y-%m-%d"),
            'T' | 'X' => self.strftime("%H:%M:%S"),
            'R' => self.strftime("%H:%M"),
            'r' => self.strftime("%I:%M:%S %p"),
            'c' => self.strftime("%a %b %e %H:%M:%S %Y"),
            // A date without a zone prints none.
            'z' | 'Z' => String::new(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before_year(year: i64) -> i64 {
    let y = year - 1;
    365 * (year - 1970) + (y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400)) - (492 - 19 + 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (unix seconds, format, text); the text is CPython's.
    #[test]
    fn formats_as_python_does() {
        let march = 1_741_356_309; // 2025-03-07 14:05:09, a Friday
        for (seconds, format, want) in [
            (march, "%Y-%m-%d", "2025-03-07"),
            (march, "%d %b %Y", "07 Mar 2025"),
            (march, "%H:%M:%S", "14:05:09"),
            (march, "%A, %-d %B %Y, %-I:%M %p", "Friday, 7 March 2025, 2:05 PM"),
            (march, "%j %U %W %w %u %y %e", "066 09 09 5 5 25  7"),
            (
                march,
                "%c|%x|%X|%D|%F|%T|%R",
                "Fri Mar  7 14:05:09 2025|03/07/25|14:05:09|03/07/25|2025-03-07|14:05:09|14:05",
            ),
            (march, "100%% %Q %", "100% %Q %"),
            (0, "%F %T %a %j", "1970-01-01 00:00:00 Thu 001"),
            (-1, "%F %T %a %j", "1969-12-31 23:59:59 Wed 365"),
            (951_782_400, "%F %a %j %U %W", "2000-02-29 Tue 060 09 09"),
            (4_107_542_400, "%F %a", "2100-03-01 Mon"),
            (1_735_689_600, "%F %I %U %W", "2025-01-01 12 00 00"),
        ] {
            assert_eq!(CivilTime::from_unix(seconds).strftime(format), want, "{seconds} {format}");
        }
    }
}
