//! The text forms of protocol 0: numbers in decimal, texts with escapes.

/// `I`: decimal; `00` and `01` are the truth values.
pub(super) enum OldInt {
    Bool(bool),
    Int(i64),
}

pub(super) fn int(line: &[u8]) -> Option<OldInt> {
    match line {
        b"00" => Some(OldInt::Bool(false)),
        b"01" => Some(OldInt::Bool(true)),
        _ => ascii(line)?.parse().ok().map(OldInt::Int),
    }
}

/// `L`: decimal, with or without a final `L`; 64 bits.
pub(super) fn long(line: &[u8]) -> Option<i64> {
    ascii(line.strip_suffix(b"L").unwrap_or(line))?.parse().ok()
}

/// `F`: as Python's `repr` writes it.
pub(super) fn float(line: &[u8]) -> Option<f64> {
    ascii(line)?.parse().ok()
}

/// An index of the memo.
pub(super) fn index(line: &[u8]) -> Option<usize> {
    ascii(line)?.parse().ok()
}

fn ascii(line: &[u8]) -> Option<&str> {
    std::str::from_utf8(line).ok().map(str::trim)
}

/// `V`: Latin-1 with `\uXXXX` and `\UXXXXXXXX`. Gives UTF-8, or `None` for escapes that are none or surrogates.
pub(super) fn unicode(line: &[u8]) -> Option<String> {
    let mut text = String::new();
    let mut rest = line;
    while let Some((&byte, tail)) = rest.split_first() {
        let digits = match (byte, tail.first()) {
            (b'\\', Some(b'u')) => 4,
            (b'\\', Some(b'U')) => 8,
            _ => 0,
        };
        if digits == 0 {
            text.push(char::from(byte));
            rest = tail;
        } else {
            text.push(char::from_u32(hex(tail.get(1..=digits)?)?)?);
            rest = tail.get(digits + 1..)?;
        }
    }
    Some(text)
}

/// `S`: the `repr` of a string of Python 2, quotes included.
pub(super) fn string(line: &[u8]) -> Option<Vec<u8>> {
    let quote = *line.first().filter(|byte| matches!(byte, b'\'' | b'"'))?;
    let mut rest = line.get(1..)?.strip_suffix(&[quote])?;
    let mut bytes = Vec::new();
    while let Some((&byte, tail)) = rest.split_first() {
        if byte != b'\\' {
            bytes.push(byte);
            rest = tail;
            continue;
        }
        let (&escape, tail) = tail.split_first()?;
        rest = tail;
        bytes.push(match escape {
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'\\' | b'\'' | b'"' => escape,
            b'x' => {
                rest = tail.get(2..)?;
                u8::try_from(hex(tail.get(..2)?)?).ok()?
            }
            _ => return None,
        });
    }
    Some(bytes)
}

fn hex(digits: &[u8]) -> Option<u32> {
    if !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_protocol_0() {
        assert_eq!(unicode(b"a\\u00e9\\U0001f600\xe9").as_deref(), Some("aé😀é"));
        assert_eq!(unicode(b"\\ud800"), None);
        assert_eq!(unicode(b"\\u12"), None);
        assert_eq!(unicode(b"\\u+123"), None);
        assert_eq!(string(b"'a\\n\\x41\\\\'").as_deref(), Some(&b"a\nA\\"[..]));
        assert_eq!(string(b"'"), None);
        assert_eq!(string(b"'a\""), None);
        assert_eq!(string(b"'\\x4'"), None);
        assert_eq!(long(b"-12L"), Some(-12));
        assert!(float(b"1e").is_none() && float(b"-1.5e3") == Some(-1500.0));
    }
}
