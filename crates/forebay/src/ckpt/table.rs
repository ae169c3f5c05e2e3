//! Columns.

use std::io::{self, Write};

/// A column that one monstrous cell widens helps nobody.
const WIDTH_MAX: usize = 100;

/// Which side a column is flush with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Writes rows under a head, two spaces between columns, none at the end of lines. Cells are safe to show.
pub(crate) fn write<const N: usize>(
    out: &mut dyn Write,
    head: [(&str, Side); N],
    rows: &[[String; N]],
) -> io::Result<()> {
    let mut widths = head.map(|(name, _)| name.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count().min(WIDTH_MAX));
        }
    }
    let names = head.map(|(name, _)| name.to_owned());
    for row in std::iter::once(&names).chain(rows) {
        let mut line = String::new();
        for ((cell, width), (_, side)) in row.iter().zip(widths).zip(head) {
            match side {
                Side::Left => line.push_str(&format!("{cell:width$}  ")),
                Side::Right => line.push_str(&format!("{cell:>width$}  ")),
            }
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut out = Vec::new();
        let head = [("STEP", Side::Right), ("STATE", Side::Left)];
        let row = |step: &str, state: &str| [step.to_owned(), state.to_owned()];
        write(&mut out, head, &[row("100000", "dead"), row("7", "")]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "  STEP  STATE\n100000  dead\n     7\n");
    }
}
