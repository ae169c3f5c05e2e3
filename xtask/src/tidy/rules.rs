//! The rules for one Rust file.

use super::Finding;
use super::source::{code_only, is_word};

const CODE_COLUMNS_MAX: usize = 100;
/// Comments are prose, which reads well a little wider. Addresses and tables cannot be broken at
/// all.
const COMMENT_COLUMNS_MAX: usize = 120;
const FUNCTION_LINES_MAX: usize = 70;
const FILE_LINES_MAX: usize = 600;

/// A comment that starts so, in a function or right above it, says why that function may be long.
const LONG_BECAUSE: &str = "// tidy: long because";

/// Words that mark unfinished work. Put together here so that this file does not find itself.
const LEFTOVER_WORDS: [&str; 2] = [concat!("FIX", "ME"), concat!("X", "XX")];
const LEFTOVER_MACROS: [&str; 3] = ["todo", "unimplemented", "dbg"];

/// All rules.
pub(super) fn check(text: &str) -> Vec<Finding> {
    let code = code_only(text);
    let mut findings = opening(text);
    findings.extend(file_length(text));
    findings.extend(columns(text));
    findings.extend(leftovers(text, &code));
    findings.extend(unsafe_places(text, &code));
    findings.extend(function_lengths(text, &code));
    findings
}

/// Every file opens with why and how.
fn opening(text: &str) -> Vec<Finding> {
    if text.starts_with("//!") {
        return Vec::new();
    }
    vec![Finding::new(1, "a file opens with `//!` and says why it is there")]
}

fn file_length(text: &str) -> Option<Finding> {
    let lines = text.lines().count();
    let what = || format!("{lines} lines, {FILE_LINES_MAX} at most; it has more than one purpose");
    (lines > FILE_LINES_MAX).then(|| Finding::new(0, what()))
}

fn columns(text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let columns = line.chars().count();
        let max = columns_max(line);
        if columns > max {
            findings.push(Finding::new(index + 1, format!("{columns} columns, {max} at most")));
        }
    }
    findings
}

fn columns_max(line: &str) -> usize {
    let Some(comment) = line.trim_start().strip_prefix("//") else { return CODE_COLUMNS_MAX };
    let prose = comment.trim_start_matches(['/', '!']).trim_start();
    if prose.starts_with('|') || prose.contains("://") { usize::MAX } else { COMMENT_COLUMNS_MAX }
}

/// Macros are looked for in code, words also in comments.
fn leftovers(text: &str, code: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, (line, code)) in text.lines().zip(code.lines()).enumerate() {
        for word in LEFTOVER_WORDS {
            if words(line).any(|(_, found)| found == word) {
                findings.push(Finding::new(index + 1, format!("`{word}` marks unfinished work")));
            }
        }
        for (end, word) in words(code).map(|(start, word)| (start + word.len(), word)) {
            let called = code.get(end..).is_some_and(|rest| rest.starts_with('!'));
            if called && LEFTOVER_MACROS.contains(&word) {
                findings.push(Finding::new(index + 1, format!("`{word}!` is not for keeping")));
            }
        }
    }
    findings
}

/// `unsafe` code only where the opening says so.
fn unsafe_places(text: &str, code: &str) -> Option<Finding> {
    let opening = text.lines().take_while(|line| line.starts_with("//!"));
    if opening.flat_map(words).any(|(_, word)| word == "unsafe") {
        return None;
    }
    let line = code.lines().position(|line| words(line).any(|(_, word)| word == "unsafe"))?;
    Some(Finding::new(line + 1, "`unsafe` in a module whose opening does not speak of it"))
}

fn function_lengths(text: &str, code: &str) -> Vec<Finding> {
    let lines: Vec<&str> = text.lines().collect();
    let mut findings = Vec::new();
    for (name, first, last) in functions(code) {
        let count = last - first + 1;
        let above = first.saturating_sub(2);
        let excused = || {
            let mut own = lines.iter().take(last).skip(above);
            own.any(|line| line.trim_start().starts_with(LONG_BECAUSE))
        };
        if count > FUNCTION_LINES_MAX && !excused() {
            let what = format!("`{name}` has {count} lines, {FUNCTION_LINES_MAX} at most");
            findings.push(Finding::new(first, what));
        }
    }
    findings
}

/// Name, first and last line (from 1) of each function with a body: `fn`, a name, and the braces
/// that follow.
fn functions(code: &str) -> Vec<(&str, usize, usize)> {
    let mut found = Vec::new();
    let mut after_fn = false;
    for (start, word) in words(code) {
        // In a macro, `fn $name` has a name only later.
        let named = !code.get(..start).unwrap_or_default().ends_with('$');
        if after_fn
            && named
            && let Some(end) = end_of_body(code, start)
        {
            let first = line_of(code, start);
            found.push((word, first, line_of(code, end)));
        }
        let rest = code.get(start + word.len()..).unwrap_or_default();
        // `fn(` is a type.
        after_fn = word == "fn" && rest.starts_with(char::is_whitespace);
    }
    found
}

/// Where the body that starts after `from` ends; `None` for a declaration without one.
fn end_of_body(code: &str, from: usize) -> Option<usize> {
    let (mut braces, mut brackets) = (0_usize, 0_usize);
    for (at, character) in code.get(from..)?.char_indices() {
        match character {
            // A semicolon also stands in array types: `[u8; 4]`.
            ';' if braces == 0 && brackets == 0 => return None,
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets = brackets.saturating_sub(1),
            '{' => braces += 1,
            '}' => {
                braces = braces.saturating_sub(1);
                if braces == 0 && brackets == 0 {
                    return Some(from + at);
                }
            }
            _ => {}
        }
    }
    None
}

fn line_of(text: &str, at: usize) -> usize {
    text.get(..at).unwrap_or_default().matches('\n').count() + 1
}

/// The names and keywords of a text and where they start.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.get(rest.find(is_word)?..)?;
        let start = text.len() - rest.len();
        let len = rest.find(|character| !is_word(character)).unwrap_or(rest.len());
        let word = rest.get(..len)?;
        rest = rest.get(len..)?;
        Some((start, word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(findings: impl IntoIterator<Item = Finding>) -> Vec<usize> {
        findings.into_iter().map(|finding| finding.line).collect()
    }

    fn of_code(rule: fn(&str, &str) -> Vec<Finding>, text: &str) -> Vec<usize> {
        lines(rule(text, &code_only(text)))
    }

    #[test]
    fn a_file_opens_with_its_reason() {
        assert!(opening("//! Why.\n").is_empty());
        assert_eq!(lines(opening("use std::io;\n//! Late.\n")), [1]);
        assert_eq!(lines(opening("")), [1]);
    }

    #[test]
    fn long_files() {
        assert!(file_length(&"x\n".repeat(600)).is_none());
        assert!(file_length(&"x\n".repeat(601)).is_some());
    }

    #[test]
    fn wide_lines() {
        let code = "x".repeat(101);
        let comment = format!("    /// {}", "x".repeat(113));
        let url = format!("// https://a.example/{code}");
        let table = format!("//! | a | {code} |");
        assert!(columns(&code[1..]).is_empty());
        assert_eq!(lines(columns(&format!("{code}\n{comment}\n{url}\n{table}\n"))), [1, 2]);
        assert!(columns(&comment[1..]).is_empty());
        assert!(columns(&"ä".repeat(100)).is_empty(), "columns, not bytes");
    }

    #[test]
    fn unfinished_work() {
        let marks = format!("// {}: later\nlet {}x = 1;\n", LEFTOVER_WORDS[0], LEFTOVER_WORDS[1]);
        assert_eq!(of_code(leftovers, &marks), [1]);
        let text = "todo!();\nlet dbg = 1;\n// dbg!(x)\nlet t = \"todo!\"; unimplemented!()\n";
        assert_eq!(of_code(leftovers, text), [1, 4]);
    }

    #[test]
    fn unsafe_code_is_announced() {
        let find = |text: &str| lines(unsafe_places(text, &code_only(text)));
        assert_eq!(find("//! Calls.\nfn f() {}\nunsafe { g() }"), [3]);
        assert!(find("//! The unsafe calls.\nunsafe { g() }").is_empty());
        assert!(find("//! Calls.\n// unsafe\nlet x = \"unsafe\"; forbid(unsafe_code)").is_empty());
        assert_eq!(find("//! Calls.\n\n//! unsafe after the opening\nunsafe {}"), [4]);
    }

    #[test]
    fn functions_are_found_with_their_ends() {
        let text = "fn a() {\n  if x { y }\n}\ntrait T {\n fn b(&self, k: [u8; 4]);\n}\n\
                    type F = fn(u8) -> u8;\nfn c<'a>(x: &'a [u8; 2]) -> u8\nwhere\n{\n '}'\n}\n\
                    macro_rules! m { () => { fn $name() {} } }\n";
        let code = code_only(text);
        assert_eq!(functions(&code), [("a", 1, 3), ("c", 8, 12)]);
    }

    #[test]
    fn long_functions_need_a_reason() {
        let long = |inside: &str| format!("fn f() {{\n{inside}\n{}}}\n", "x;\n".repeat(69));
        assert_eq!(of_code(function_lengths, &long("")), [1]);
        assert!(
            of_code(function_lengths, &long("// tidy: long because it is one table")).is_empty()
        );
        let above = format!("// tidy: long because a table\n{}", long(""));
        assert!(of_code(function_lengths, &above).is_empty());
        let short = format!("fn f() {{\n{}}}\n", "x;\n".repeat(68));
        assert!(of_code(function_lengths, &short).is_empty());
    }

    #[test]
    fn all_rules_run() {
        let text = format!("{}\nunsafe {{ todo!() }}\n", "x".repeat(101));
        assert_eq!(lines(check(&text)), [1, 1, 2, 2]);
    }
}
